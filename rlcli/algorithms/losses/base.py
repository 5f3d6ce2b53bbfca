"""The base of all losses: their result, their registry, the ratio, and sums over a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli.algorithms.function_registry import FunctionRegistry
from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.lazy import Tensor, torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(frozen=True)
class TokenLoss:
    """Result of a policy loss, for each response token."""

    loss: Float[Tensor, " R"]
    """Loss of each token."""
    clipped_low: Bool[Tensor, " R"]
    """True if a lower bound clipped the token."""
    clipped_high: Bool[Tensor, " R"]
    """True if an upper bound clipped the token."""


LossFunction = Callable[..., TokenLoss]
"""Takes `LossInputs`, and options."""

COLUMNS = frozenset(LossInputs.columns()) - {
    *("rollout_log_probs", "teacher_agrees", "entropy", "kept", "kept_indexes", "right", "group_tokens")
}
"""The columns that a policy loss may declare."""

loss_functions: FunctionRegistry[TokenLoss] = FunctionRegistry("policy loss", ("inputs",), lambda rules: COLUMNS)


def unclipped(loss: Tensor) -> TokenLoss:
    """`loss` (float [R]) of a function that clips nothing.

    >>> unclipped(torch.tensor([0.5, 1.5])).clipped_high
    tensor([False, False])
    """
    nowhere = torch.zeros_like(loss, dtype=torch.bool)
    return TokenLoss(loss, nowhere, nowhere)


def ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """ρ = exp(clamp(log π − log π_old, ±20)), float [R]: finite, and without gradient beyond the clamp.

    >>> ratio(torch.tensor([0.0, -1.0, 500.0]), torch.tensor([0.0, 0.0, 0.0]))
    tensor([1.0000e+00, 3.6788e-01, 4.8517e+08])
    """
    return (log_probs - old_log_probs).clamp(-20.0, 20.0).exp()


def sequence_sums(values: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
    """Σ_t of each sequence: float64 [S], 0 for an empty one. Long sums in float32 would lose digits of a ratio.

    >>> sequence_sums(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 0, 2]), torch.tensor([2, 0, 1]))
    tensor([3., 0., 5.], dtype=torch.float64)
    """
    sums = torch.zeros(lengths.shape, dtype=torch.float64, device=values.device)
    return sums.index_add(0, sequence, values.double())
