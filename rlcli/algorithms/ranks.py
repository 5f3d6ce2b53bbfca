"""The ranks that share a batch, for the few sums over all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlcli.algorithms.lazy import Tensor


@dataclass(frozen=True)
class Ranks:
    """Collectives over the ranks: every rank calls them in the same order."""

    add: Callable[[Tensor], Tensor]
    """Sums a tensor, of the same shape on every rank, over the ranks."""
    gather: Callable[[Tensor], Tensor]
    """Concatenates 1-D tensors of any lengths in the order of the ranks."""


ALONE = Ranks(add=lambda tensor: tensor, gather=lambda tensor: tensor)
"""A single rank, which holds the whole batch."""
