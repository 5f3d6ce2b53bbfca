"""Expert parallelism: the experts of each layer are divided over ranks (GShard, arXiv 2006.16668, section 3.2).

Each rank dispatches its tokens to the ranks that have the tokens' experts, computes its experts for the tokens of all
ranks of the group, and sends the outputs back, which the token's rank adds up. Expert weights and gradients are not
exchanged within the group; across groups FSDP2 shards and reduces them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlcli.errors import ModelError
from rlcli.model.mixture.expert_adapters import factors_of, forward_of
from rlcli.model.mixture.routing import occurrences
from rlcli.model.parallel.parallel_dims import EXPERT, EXPERT_SHARD, REPLICATE
from rlcli.model.parallel.row_exchange import exchange
from rlcli.model.tensor_names import DOWN

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from rlcli.model.decoder import Decoder


class Experts(nn.Module):
    """Attributes of transformers' module with the experts of one layer. For type checkers only: transformers has a
    class for each architecture."""

    num_experts: int
    """Experts whose weights the module has: all of the layer, or those of this rank."""
    first: int
    """Index of this rank's first expert in the layer; set by `divide_experts`."""


def experts_of(model: nn.Module) -> list[Experts]:
    """The experts module of each layer that has experts, in the order of the layers."""
    name = DOWN.rpartition(".")[2]
    # In other modules the name is that of a child module.
    return [cast(Experts, module) for module in model.modules() if name in module._parameters]


def divide_experts(model: Decoder, mesh: DeviceMesh, world: int, precision: MixedPrecisionPolicy) -> None:
    """Divide the experts of `model`, in place, over the dimension `expert` of `mesh` (`ParallelDims.experts_mesh`), and
    shard each part over the other dimensions. world: number of ranks over which FSDP2 averages other gradients. Raises
    `ModelError` if the number of experts is not divisible."""
    names = mesh.mesh_dim_names or ()
    expert_mesh, fsdp_mesh = mesh[EXPERT], mesh[tuple(name for name in (REPLICATE, EXPERT_SHARD) if name in names)]
    for experts in experts_of(model):
        if experts.num_experts % expert_mesh.size():
            raise ModelError(
                f"{model.source}: parallel.expert = {expert_mesh.size()} does not divide its {experts.num_experts} "
                "experts",
                "give a divisor of it",
            )
        for name, parameter in list(experts.named_parameters(recurse=False)):
            local = distribute_tensor(parameter.detach(), expert_mesh, [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(local, parameter.requires_grad))
        vars(experts).update(forward=partial(_forward, experts, forward_of(experts), expert_mesh))
        experts.num_experts //= expert_mesh.size()
        experts.first = expert_mesh.get_local_rank() * experts.num_experts
        sharded = fully_shard(experts, mesh=fsdp_mesh, mp_policy=precision)
        # A rank's gradient is already that of all tokens of its group.
        sharded.set_gradient_divide_factor(float(world))
        # Gloo has no scaled sums. (With one rank FSDP2 would divide twice under forced sums.)
        sharded.set_force_sum_reduction_for_comms(mesh[EXPERT_SHARD].size() > 1)


def _forward(
    experts: Experts,
    compute: Callable[..., Tensor],
    mesh: DeviceMesh,
    hidden: Float[Tensor, "T H"],
    expert_ids: Int[Tensor, "T K"],
    weights: Float[Tensor, "T K"],
) -> Float[Tensor, "T H"]:
    """The weighted sum of each token's expert outputs. compute: the forward pass of a module that has all experts.
    Collective."""
    group, ranks, local_experts = mesh.get_group(), mesh.size(), experts.num_experts
    by_expert = expert_ids.flatten().argsort(stable=True)
    counts = occurrences(expert_ids.flatten(), ranks * local_experts).view(ranks, local_experts)
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(received_counts, counts, group=group)
    # The host synchronises once per layer: it needs the sizes of the exchange.
    sent, received = torch.stack([counts.sum(1), received_counts.sum(1)]).tolist()
    tokens = exchange(hidden[by_expert // expert_ids.shape[1]], sent, received, group)
    local_ids = torch.arange(local_experts, device=hidden.device).repeat(ranks)
    expert = local_ids.repeat_interleave(received_counts.flatten(), output_size=sum(received))
    outputs = exchange(_local_outputs(experts, compute, tokens, expert), received, sent, group)
    token_outputs = outputs[by_expert.argsort()].view(*expert_ids.shape, -1)
    return (token_outputs * weights[..., None]).sum(1).to(hidden.dtype)


def _local_outputs(
    experts: Experts, compute: Callable[..., Tensor], tokens: Float[Tensor, "N H"], expert: Int[Tensor, " N"]
) -> Float[Tensor, "N H"]:
    """The output of this rank's `expert` for each of `tokens`."""
    parameters = dict(experts._parameters)
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in parameters.items()}
    if not len(tokens):  # the weights still take part in the reduction of gradients
        weights = [weight for weight in (*local.values(), *factors_of(experts)) if weight is not None]
        return tokens + sum(weight.sum() for weight in weights) * 0
    experts._parameters.update(local)
    try:
        return compute(experts, tokens, expert[:, None], tokens.new_ones(len(tokens), 1))
    finally:
        experts._parameters.update(parameters)
