"""Checks that weights are finite: one NaN makes every log-prob NaN, and first shows as a mismatch with the engine."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rlcli.errors import ModelError

AT_ONCE = 1 << 24
"""Elements that are checked at a time, which bounds the memory of the check."""


def check_finite(path: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise `ModelError` for the first of the named tensors of the model at `path` with NaN or infinity."""
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        bad = int(sum((~torch.isfinite(part)).sum() for part in tensor.detach().reshape(-1).split(AT_ONCE)))
        if bad:
            raise ModelError(
                f"{path}: {bad} of {tensor.numel()} weights of {name} are NaN or infinite",
                "download the model again, or take a checkpoint from before it diverged",
            )
