"""Sums, means and spreads: over the responses to one prompt, and over all values of a step. All in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli.algorithms.lazy import Tensor, torch
from rlcli.algorithms.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64


@dataclass(frozen=True)
class Grouped:
    """Rewards with statistics of their groups. Every tensor has one entry a response."""

    index: Int64[Tensor, " S"]
    """Dense group labels 0 … G − 1, in the order of the labels passed in."""
    sizes: Float64[Tensor, " S"]
    """n, the size of the response's group."""
    raised: Float64[Tensor, " S"]
    """R minus the lowest reward of the group: equal rewards are then exactly 0 whatever their value, while R − mean_g
    of, say, six rewards of 0.1 is not."""

    @classmethod
    def of(cls, rewards: Tensor, groups: Tensor) -> Grouped:
        _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
        exact = rewards.double()
        lowest = exact.new_empty(len(counts)).scatter_reduce_(0, index, exact, "amin", include_self=False)
        # Two int64 tensors would divide in float32, so the sizes are floats too.
        return cls(index, counts.double()[index], exact - lowest[index])

    @property
    def centred(self) -> Tensor:
        """R − mean_g: float64 [S], exactly 0 in a group of equal rewards."""
        return self.raised - self.sum(self.raised) / self.sizes

    @property
    def std(self) -> Tensor:
        """Standard deviation of the response's group, unbiased (÷ n − 1): float64 [S]; 0 in a group of one."""
        return (self.sum(self.centred.square()) / (self.sizes - 1).clamp(min=1)).sqrt()

    def sum(self, values: Tensor) -> Tensor:
        """Σ of `values` (float64 [S]) over each response's group: float64 [S]."""
        return torch.zeros_like(values).index_add_(0, self.index, values)[self.index]

    def highest(self, values: Tensor) -> Tensor:
        """The highest of `values` (float64 [S]) in each response's group: float64 [S]."""
        return torch.empty_like(values).scatter_reduce_(0, self.index, values, "amax", include_self=False)[self.index]


def whiten(values: Tensor, weights: Tensor | None = None, ranks: Ranks = ALONE) -> Tensor:
    """(x − mean) / √(var + 1e-8) over the values of all ranks, var unbiased (÷ count − 1).

    values: [K] of this rank. weights: [K], how many times each value counts; None: once. Returns [K] in the dtype of
    the values; equal values, including a single one, give exactly 0.

    The values 1, 1, 0 have mean 2/3 and variance (1/9 + 1/9 + 4/9) / 2 = 1/3:

    >>> whiten(torch.tensor([1.0, 1.0, 0.0]))
    tensor([ 0.5774,  0.5774, -1.1547])
    >>> whiten(torch.tensor([1.0, 0.0]), torch.tensor([2, 1]))
    tensor([ 0.5774, -1.1547])
    """
    exact = values.double()
    weight = torch.ones_like(exact) if weights is None else weights.double()
    # Relative to one of the values: equal ones are then exactly 0, and a large common offset costs no digits.
    raised = exact - ranks.gather(exact[weight > 0][:1])[:1].sum()
    count, total = ranks.add(torch.stack([weight.sum(), (weight * raised).sum()]))
    centred = raised - total / count.clamp(min=1)
    variance = ranks.add((weight * centred.square()).sum()) / (count - 1).clamp(min=1)
    whitened: Tensor = (centred / (variance + 1e-8).sqrt()).to(values.dtype)
    return whitened
