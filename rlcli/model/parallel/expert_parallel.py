"""Expert parallelism: ranks that divide the experts of each layer (GShard, arXiv 2006.16668, section 3.2).

Each rank sends every token to the ranks that have its experts, computes its own experts for the tokens of all ranks of
the group, and sends the results back, which are added up where the token is. Experts' weights and gradients so stay
where they are; between the groups FSDP2 shards and reduces them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlcli.errors import ModelError
from rlcli.model.mixture.expert_adapters import factors_of, forward_of
from rlcli.model.mixture.routing import occurrences
from rlcli.model.parallel.parallel_dims import BESIDE, EXPERT, REPLICATE
from rlcli.model.parallel.row_exchange import exchange
from rlcli.model.tensor_names import DOWN

if TYPE_CHECKING:
    from rlcli.model.decoder import Decoder


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The experts of each layer that has some, in their order: of each, all in one module."""
    name = DOWN.rpartition(".")[2]
    return [module for module in model.modules() if name in module._parameters]  # elsewhere it is a layer


def divide_experts(model: Decoder, mesh: DeviceMesh, world: int, precision: MixedPrecisionPolicy) -> None:
    """Divide the experts of `model`, in place, over the dimension `expert` of `mesh` (`ParallelDims.experts_mesh`), and
    shard each part over the ranks beside. world: number of ranks that FSDP2 averages other gradients over. Raises
    `ModelError` if they cannot be divided."""
    names = mesh.mesh_dim_names or ()
    among, beside = mesh[EXPERT], mesh[tuple(name for name in (REPLICATE, BESIDE) if name in names)]
    for experts in experts_of(model):
        if experts.num_experts % among.size():
            raise ModelError(
                f"{model.source}: parallel.expert = {among.size()} does not divide its {experts.num_experts} experts",
                "give a divisor of it",
            )
        for name, parameter in list(experts.named_parameters(recurse=False)):
            own = nn.Parameter(
                distribute_tensor(parameter.detach(), among, [Shard(0)], src_data_rank=None), parameter.requires_grad
            )
            setattr(experts, name, own)
        experts.forward = partial(_forward, experts, forward_of(experts), among)
        experts.num_experts //= among.size()
        experts.first = among.get_local_rank() * experts.num_experts
        fully_shard(experts, mesh=beside, mp_policy=precision)
        # A rank's gradient is already that of all tokens of its group.
        experts.set_gradient_divide_factor(float(world))
        # Gloo has no scaled sums. (Over one rank FSDP2 would divide twice if it were told to add up.)
        experts.set_force_sum_reduction_for_comms(mesh[BESIDE].size() > 1)


def _forward(experts: Any, compute: Any, mesh: DeviceMesh, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The sum of its experts' outputs for each of T tokens, `[T, H]`. hidden [T, H]; chosen [T, K]: ids; weights
    [T, K]: of their outputs. compute: the forward pass of the module with all experts. Collective."""
    group, ranks, each = mesh.get_group(), mesh.size(), experts.num_experts
    by_expert = chosen.flatten().argsort(stable=True)
    counts = occurrences(chosen.flatten(), ranks * each).view(ranks, each)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    # The host waits once a layer: it has to know how much it exchanges.
    sent, received = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
    tokens = exchange(hidden[by_expert // chosen.shape[1]], sent, received, group)
    local = torch.arange(each, device=hidden.device).repeat(ranks)
    expert = local.repeat_interleave(theirs.flatten(), output_size=sum(received))
    outputs = exchange(_computed(experts, compute, tokens, expert), received, sent, group)
    back = outputs[by_expert.argsort()].view(*chosen.shape, -1)
    return (back * weights[..., None]).sum(1).to(hidden.dtype)


def _computed(experts: Any, compute: Any, tokens: Tensor, expert: Tensor) -> Tensor:
    """The output of this rank's `expert` [N] for each of `tokens` [N, H]."""
    gathered = dict(experts._parameters)
    own = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in gathered.items()}
    if not len(tokens):  # its weights still take part in the reduction of gradients
        return tokens + sum(one.sum() for one in (*own.values(), *factors_of(experts))) * 0
    experts._parameters.update(own)
    try:
        found: Tensor = compute(experts, tokens, expert[:, None], tokens.new_ones(len(tokens), 1))
    finally:
        experts._parameters.update(gathered)
    return found
