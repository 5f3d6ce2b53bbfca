"""LoRA on the experts of a mixture: two factors for each matrix of each expert.

They are stored as peft stores factors of fused weights, in memory and in the files that vLLM reads: for E experts down
[E r, in] and up [out, r E], the last dimension with experts innermost. peft adds their product to the weights in each
pass, which allocates another tensor of all experts' size in every layer; here tokens are multiplied by the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from transformers.integrations.moe import _grouped_linear  # chooses a kernel as the base does

from rlcli.model.mixture.routing import occurrences
from rlcli.model.parallel.buckets import rows_of
from rlcli.model.tensor_names import DOWN, UP, base_name

PARAMETERS = [UP.removeprefix("."), DOWN.removeprefix(".")]
"""Ends of the names of the parameters that peft adapts."""
ALIGNED = 8
"""Kernels for grouped products take rows of a multiple of 16 bytes."""


def pass_through_factors(lm: nn.Module) -> None:
    """Patch the experts of `lm` that have adapters of peft to multiply tokens by the factors."""
    for wrapper in [module for module in lm.modules() if isinstance(module, ParamWrapper)]:
        experts: Any = wrapper.get_base_layer()
        wrapper.forward = partial(_inner, wrapper)
        adapters = {**vars(experts).get("adapters", {}), wrapper.parameter_name: wrapper}
        # Not an attribute that torch would register: the wrappers hold the experts.
        vars(experts).update(adapters=adapters, forward=partial(_adapted, experts))


def forward_of(experts: nn.Module) -> Callable[..., Tensor]:
    """The experts' forward function, with their adapters if they have some; its first argument is the module."""
    return _adapted if "adapters" in vars(experts) else type(experts).forward


def factors_of(experts: nn.Module) -> list[nn.Parameter]:
    """The factors of the experts' adapters."""
    adapters = vars(experts).get("adapters", {}).values()
    return [part["default"].weight for wrapper in adapters for part in (wrapper.lora_A, wrapper.lora_B)]


def _inner(wrapper: ParamWrapper, *inputs: Tensor) -> Tensor:
    """Forward pass of a wrapper. Wrappers are nested: only the experts inside compute."""
    output: Tensor = wrapper.base_layer(*inputs)
    return output


def _adapted(experts: Any, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the outputs of the experts `expert_ids` [T, K] for each of T tokens `hidden`, `[T, H]`, as
    transformers' grouped products give it, with each expert's adapter."""
    pairs = expert_ids.flatten()
    order = pairs.argsort(stable=True)
    ends = occurrences(pairs, experts.num_experts).cumsum(0).to(torch.int32)
    up = _product(experts, "gate_up_proj", hidden[order // expert_ids.shape[1]], ends)
    outputs = _product(experts, "down_proj", experts._apply_gate(up), ends)
    weighted = outputs * weights.flatten()[order, None]
    return weighted[order.argsort()].view(*expert_ids.shape, -1).sum(1).to(hidden.dtype)


def _product(experts: Any, name: str, rows: Tensor, ends: Tensor) -> Tensor:
    """W x + scale · B A x with the expert of each row, `[N, in] → [N, out]`. ends: end of the rows of each expert."""
    base_output: Tensor = _grouped_linear(rows, getattr(experts, name), ends)
    wrapper = experts.adapters[name]
    down, up = by_expert(wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight, wrapper.r["default"])
    first = getattr(experts, "first", 0)
    local_experts = slice(first, first + experts.num_experts)
    down, up = down[local_experts], up[local_experts]
    if padding := -down.shape[1] % ALIGNED:  # zeros, which add nothing
        down, up = pad(down, (0, 0, 0, padding)), pad(up, (0, padding))
    small = _grouped_linear(rows.to(down.dtype), down, ends)
    added = _grouped_linear(small, up.contiguous(), ends)
    return base_output.add(added.to(base_output.dtype), alpha=wrapper.scaling["default"])


def by_expert(down: Tensor, up: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Views [E, r, in] and [E, out, r] of peft's factors; of a linear layer's with E = 1."""
    return down.unflatten(0, (-1, rank)), up.unflatten(1, (rank, -1)).permute(2, 0, 1)


def adapters_on_experts(lm: nn.Module) -> Iterator[tuple[str, str, ParamWrapper]]:
    """For each adapter on experts the name of its weight in the base model, and its name and module in `lm`."""
    for name, module in lm.named_modules():
        if isinstance(module, ParamWrapper):
            yield base_name(f"{name}.{module.parameter_name}"), name, module


def added(wrapper: ParamWrapper, base: Tensor, factors: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """The weight `base` with the adapter added in float32; `base` may be sharded over experts. factors: peft's, of all
    experts."""
    down, up = by_expert(*factors, wrapper.r["default"])
    if not isinstance(base, DTensor):
        return torch.baddbmm(base.detach().float(), up, down, alpha=scale)
    local, rows = base.to_local(), rows_of(base)
    first = rows.begin if rows is not None else 0
    local_experts = slice(first, first + len(local))
    total = torch.baddbmm(local.detach().float(), up[local_experts], down[local_experts], alpha=scale)
    return DTensor.from_local(total, base.device_mesh, base.placements, shape=base.shape, stride=base.stride())
