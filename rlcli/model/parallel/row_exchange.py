"""A differentiable all-to-all of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


def exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    """Send the rows `x`, rank after rank, and return the rows that each rank of `group` has for this one, in the same
    order. sent, received: number of rows for and from each rank. Collective, and so is the backward pass."""
    received_rows: Tensor = _Exchange.apply(x, list(sent), list(received), group)
    return received_rows


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.reverse = received, sent, group
        received_rows = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(received_rows, x.contiguous(), received, sent, group=group)
        return received_rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.reverse
        input_grad = grad.new_empty(sum(received), *grad.shape[1:])
        dist.all_to_all_single(input_grad, grad.contiguous(), received, sent, group=group)
        return input_grad, None, None, None
