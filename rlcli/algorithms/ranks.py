"""The ranks that share a batch, for the few sums over all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlcli.algorithms.lazy import Tensor


@dataclass(frozen=True)
class Ranks:
    """add: sums a tensor, of the same shape on every rank, over the ranks. gather: concatenates 1-D tensors of any
    lengths in the order of the ranks. Both are collective: every rank calls them in the same order."""

    add: Callable[[Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]


ALONE = Ranks(add=lambda tensor: tensor, gather=lambda tensor: tensor)
"""A single rank, which holds everything."""
