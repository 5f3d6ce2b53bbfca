"""Rows that ranks send each other in a pass, with gradients that take the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


def exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    """The rows that each rank of `group` has for this one, rank after rank. x: this rank's rows for each of them.
    sent, received: their numbers, by rank. Collective, and so is the backward pass."""
    found: Tensor = _Exchange.apply(x, list(sent), list(received), group)
    return found


class _Exchange(torch.autograd.Function):
    """Rows for each rank against rows of each rank; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.way_back = received, sent, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.way_back
        out = grad.new_empty(sum(received), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), received, sent, group=group)
        return out, None, None, None
