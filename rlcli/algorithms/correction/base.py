"""The base of all corrections: their registry, the ratio, and the product of several corrections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any

from rlcli.algorithms.lazy import Tensor
from rlcli.algorithms.losses.base import sequence_sums
from rlcli.algorithms.named import Named, call

CorrectionFunction = Callable[..., Tensor]

_correction: Named[CorrectionFunction] = Named("rollout correction")
get = _correction.get
names = _correction.names
register = _correction.register

LIMIT = 20.0
"""Largest difference of two log-probs that is used: an engine may report −inf."""


def rejects(function: CorrectionFunction) -> CorrectionFunction:
    """Decorator: tokens for which the function returns 0 leave the minibatch, including its denominators. (A weight of
    0 alone removes a token from the sum, but not from the denominator.)

    Such a function is called once before the first update of a step, on log π at that time; its results are 0 or 1.
    """
    function.rejects = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Corrections:
    """The functions in `algorithm.correction`, one or several joined with `*`: their weights are multiplied.

    >>> from torch import tensor
    >>> inputs = {"log_probs": tensor([0.5, 0.3, 0.9]).log(), "rollout_log_probs": tensor([0.4, 0.6, 0.1]).log()}
    >>> inputs |= {"sequence": tensor([0, 0, 1]), "lengths": tensor([2, 1])}
    >>> both = Corrections.of("token_tis * sequence_mask")  # r = 1.25, 0.5 and 9; Π = 0.625 and 9
    >>> both.weights(inputs, {})
    tensor([1.2500, 0.5000, 0.0000])
    >>> both.kept(inputs, {})
    tensor([ True,  True, False])
    """

    functions: tuple[CorrectionFunction, ...]

    @classmethod
    def of(cls, text: str) -> Corrections:
        """Raises `UnknownName` for an unknown name."""
        return cls(tuple(get(name.strip()) for name in text.split("*")))

    @property
    def rejecting(self) -> tuple[CorrectionFunction, ...]:
        return tuple(function for function in self.functions if getattr(function, "rejects", False))

    def weights(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor:
        """The product of all weights: float [T]."""
        return reduce(mul, [call(function, inputs, options) for function in self.functions])

    def kept(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor:
        """The tokens that no function rejects: bool [T]."""
        return reduce(mul, [call(function, inputs, options) for function in self.rejecting]) > 0


def log_ratio_of(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """log r of each token: float64 [T]."""
    return (log_probs.detach().double() - rollout_log_probs.detach().double()).clamp(-LIMIT, LIMIT)


def product_of(log_ratio: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
    """Π of each token's response: float64 [T]."""
    return sequence_sums(log_ratio, sequence, lengths).clamp(-LIMIT, LIMIT).exp()[sequence]


def mean_of(log_ratio: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
    """The mean of log r over each token's response: float64 [T]. It is within the clamp, like its terms."""
    return (sequence_sums(log_ratio, sequence, lengths) / lengths.clamp(min=1))[sequence]


def within(ratio: Tensor, low: float, high: float) -> Tensor:
    """Whether low ≤ ratio ≤ high: bool [T]."""
    return (low <= ratio) & (ratio <= high)
