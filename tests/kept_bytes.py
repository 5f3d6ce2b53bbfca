"""Bytes that autograd saves in a forward pass, for comparison with the planner's prediction."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def kept_by_torch(model: nn.Module, run: Callable[[], object]) -> float:
    """Bytes of the distinct storages that autograd saves in `run`, without the model's own."""
    parameter_storages = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameter_storages:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return float(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))
