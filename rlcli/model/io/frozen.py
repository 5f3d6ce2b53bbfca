"""Weights of a model that sees pictures that do not train (`model.freeze`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from rlcli.images.rule import PROJECTOR


def freeze(lm: Any, parts: Collection[str], dtype: torch.dtype) -> list[str]:
    """Freeze parts of `lm`'s tower: `encoder`, all but the projector; `projector`; or `vision`, both. To be called
    before FSDP2 shards the model. Returns the names of the frozen parameters in `lm`.

    dtype: of computation, in which frozen weights are kept. What comes before the first trained weight runs without
    gradient: autograd keeps nothing of it.
    """
    wanted = {"encoder", "projector"} if "vision" in parts else set(parts)
    tower = lm.base_model.visual
    frozen = {id(parameter) for name, parameter in tower.named_parameters() if _part(name) in wanted}
    for parameter in tower.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
    if "encoder" in wanted:
        for module in [tower] if "projector" in wanted else _before_projector(tower):
            module.forward = torch.no_grad()(module.forward)
    return [name for name, parameter in lm.named_parameters() if id(parameter) in frozen]


def _part(name: str) -> str:
    """Of a tower's parameter."""
    return "projector" if name.partition(".")[0] in PROJECTOR else "encoder"


def _before_projector(tower: nn.Module) -> Iterator[nn.Module]:
    for name, module in tower.named_children():
        if name not in PROJECTOR:
            yield from module if isinstance(module, nn.ModuleList) else [module]
