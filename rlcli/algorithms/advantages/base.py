"""The type of advantage functions, and their registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from rlcli.algorithms.function_registry import FunctionRegistry, Level
from rlcli.algorithms.lazy import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


class TokenAdvantages(NamedTuple):
    """Result of a token-level advantage function."""

    advantages: Float[Tensor, " R"]
    """Advantage of each response token."""
    returns: Float[Tensor, " R"] | None
    """Target of the critic at each response token; None without a critic."""


AdvantageFunction = Callable[..., Tensor | TokenAdvantages]
"""Takes `AdvantageInputs`, and options. Returns float [S] at the level `response`, float [S, K] at the level `turn`,
and `TokenAdvantages` at the level `token`."""

COLUMNS: dict[Level, frozenset[str]] = {
    "response": frozenset({"rewards", "groups", "lengths", "baselines", "parts", "part_weights"}),
    "turn": frozenset({"turn_rewards", "turn_states", "turns", "groups"}),
    "token": frozenset(
        {"token_rewards", "values", "process_rewards", "old_log_probs", "teacher_log_probs"}
        | {"sequence", "lengths", "rewards", "groups"}
    ),
}
"""The columns that an advantage of each level may declare."""

_advantage: FunctionRegistry[Tensor | TokenAdvantages] = FunctionRegistry(
    "advantage", ("inputs",), lambda rules: COLUMNS[rules.level]
)
get = _advantage.get
part = _advantage.part
names = _advantage.names
register = _advantage.register
rules = _advantage.rules
