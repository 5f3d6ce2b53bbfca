"""The base of all corrections: their registry, the ratio, and the product of several corrections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import mul

from rlcli.algorithms.function_registry import FunctionRegistry, Part, Rules
from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.lazy import Tensor
from rlcli.algorithms.losses.base import sequence_sums

CorrectionFunction = Callable[..., Tensor]
"""Takes `LossInputs`, and options."""

BEFORE_UPDATES = frozenset({"old_log_probs", "rollout_log_probs", "sequence", "lengths"})
"""The columns that a rejection may declare: before the first update there is only one policy, and there may be no
advantages yet."""
COLUMNS = BEFORE_UPDATES | {"log_probs", "advantages"}
"""The columns that another correction may declare."""


def _columns(rules: Rules) -> frozenset[str]:
    return BEFORE_UPDATES if rules.rejects else COLUMNS


_correction: FunctionRegistry[Tensor] = FunctionRegistry("rollout correction", ("inputs",), _columns)
get = _correction.get
part = _correction.part
names = _correction.names
register = _correction.register

LIMIT = 20.0
"""Largest difference of two log-probs that is used: an engine may report −inf."""


@dataclass(frozen=True)
class Corrections:
    """The functions in `algorithm.correction`, one or several joined with `*`: their weights are multiplied.

    >>> from torch import tensor
    >>> inputs = LossInputs(
    ...     old_log_probs=tensor([0.5, 0.3, 0.9]).log(), rollout_log_probs=tensor([0.4, 0.6, 0.1]).log(),
    ...     sequence=tensor([0, 0, 1]), lengths=tensor([2, 1]),
    ... )
    >>> both = Corrections.of("token_tis * sequence_mask")  # r = 1.25, 0.5 and 9; Π = 0.625 and 9
    >>> both.weights(inputs)
    tensor([1.2500, 0.5000, 0.0000])
    >>> both.kept(inputs)
    tensor([ True,  True, False])
    """

    parts: tuple[Part[Tensor], ...]

    @classmethod
    def of(cls, text: str, options: Mapping[str, object] | None = None) -> Corrections:
        """The corrections that `text` names, each with those of the options that it takes. Raises `UnknownName` for an
        unknown name."""
        return cls(tuple(_correction.part(name.strip(), options) for name in text.split("*")))

    @property
    def rejecting(self) -> tuple[Part[Tensor], ...]:
        """Corrections that may reject tokens."""
        return tuple(part for part in self.parts if part.rules.rejects)

    def weights(self, inputs: LossInputs) -> Tensor:
        """The product of all weights: float [R]."""
        return reduce(mul, [part(inputs) for part in self.parts])

    def kept(self, inputs: LossInputs) -> Tensor:
        """The tokens that no function rejects: bool [R]."""
        return reduce(mul, [part(inputs) for part in self.rejecting]) > 0


def log_ratio(inputs: LossInputs) -> Tensor:
    """log r = log π_old − log μ of each token: float64 [R]."""
    return log_ratio_of(inputs.old_log_probs, inputs.rollout_log_probs)


def log_ratio_of(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """log r of each token: float64 [R]."""
    return (log_probs.detach().double() - rollout_log_probs.detach().double()).clamp(-LIMIT, LIMIT)


def product_of(log_ratio: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
    """Π of each token's response: float64 [R]."""
    return sequence_sums(log_ratio, sequence, lengths).clamp(-LIMIT, LIMIT).exp()[sequence]


def mean_of(log_ratio: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
    """The mean of log r over each token's response: float64 [R]. It is within the clamp, like its terms."""
    return (sequence_sums(log_ratio, sequence, lengths) / lengths.clamp(min=1))[sequence]


def within(ratio: Tensor, low: float, high: float) -> Tensor:
    """True where low ≤ ratio ≤ high: bool [R]."""
    return (low <= ratio) & (ratio <= high)
