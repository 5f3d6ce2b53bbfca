"""The ranks that hold a batch together, for the few sums that go over all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlcli.algorithms.lazy import Tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Ranks:
    """add: a tensor, of the same shape on every rank, summed over them. gather: 1-D tensors of any lengths, joined in
    the order of the ranks. Both collective: every rank calls them in the same order."""

    add: Callable[[Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]


ALONE = Ranks(add=_same, gather=_same)
"""One rank, which has it all."""
