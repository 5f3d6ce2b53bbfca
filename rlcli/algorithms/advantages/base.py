"""The type of advantage functions, and their registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rlcli.algorithms.lazy import Tensor
from rlcli.algorithms.named import Named


class TokenAdvantages(NamedTuple):
    """advantages: float [T]. returns: float [T], what the critic learns to predict; None without a critic."""

    advantages: Tensor
    returns: Tensor | None


AdvantageFunction = Callable[..., Tensor | TokenAdvantages]
"""Takes inputs by name. One that takes `sequence` is token-level and returns `TokenAdvantages`; one that takes
`turn_rewards` is turn-level and returns float [N, K]; the others are response-level and return float [N]."""

_advantage: Named[AdvantageFunction] = Named("advantage")
get = _advantage.get
names = _advantage.names
register = _advantage.register
rules = _advantage.rules
