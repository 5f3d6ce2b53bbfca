"""Frozen weights of a vision-language model (`model.freeze`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlcli.model.tensor_names import DECODER, PROJECTORS, has_vision_encoder, vision_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def freeze(lm: PreTrainedModel, parts: Collection[str], dtype: torch.dtype) -> list[str]:
    """Freeze parts of `lm`'s vision encoder: `encoder`, all but the projector; `projector`; or `vision`, both. To be
    called before FSDP2 shards the model. Returns the names of the frozen parameters in `lm`.

    dtype: of computation; frozen weights are converted to it. Modules before the first trained weight run without
    gradient, so that autograd keeps no activations.
    """
    wanted = {"encoder", "projector"} if "vision" in parts else set(parts)
    names = [name for name, _ in lm.named_parameters() if vision_part(lm, name) in wanted]
    for name in names:
        parameter = lm.get_parameter(name)
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    if "encoder" in wanted:
        for part in vision_modules(lm):
            for module in _frozen_modules(part):
                module.forward = torch.no_grad()(module.forward)
    return names


def vision_part(lm: PreTrainedModel, name: str) -> str:
    """`encoder`, `projector`, or empty for a parameter of the text decoder. name: in `lm`."""
    parts = name.removeprefix(f"{lm.base_model_prefix}.").split(".")
    if not has_vision_encoder(lm) or parts[0] in (DECODER, "lm_head"):
        return ""
    return "projector" if PROJECTORS.intersection(parts) else "encoder"


def _frozen_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The largest modules within `module` all of whose weights are frozen."""
    trained = [parameter.requires_grad for parameter in module.parameters()]
    if trained and not any(trained) and not isinstance(module, nn.ModuleList):
        yield module
        return
    for child in module.children():
        yield from _frozen_modules(child)
