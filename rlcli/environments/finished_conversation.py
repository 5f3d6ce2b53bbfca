"""What a round of conversations asks of the engine, and what it hands over to be verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlcli.data.trajectories import Trajectory
from rlcli.types import ENDED, Verdict

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Turn:
    """What the engine does next for the sample `key`: continue `tokens`, int32 `[n]`, by at most `room`. number: of the
    turn, from 0. begun: int32 `[m]`, what an earlier round drew of this turn; `room` includes it. pictures: those in
    `tokens`, as the model sees them."""

    key: int
    tokens: np.ndarray
    room: int
    number: int
    begun: np.ndarray | None = None
    pictures: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class Held:
    """A conversation that is over. whole: its trajectory. fields: of the verifier's request. failure: the verdict on a
    sample whose environment failed; None otherwise. turn_rewards, turn_states: as `Sample` has them. copies: digest → a
    small copy, of the pictures that its messages show."""

    key: int
    whole: Trajectory
    fields: Mapping[str, Any]
    tool_calls: int
    failed_calls: int
    failure: Verdict | None = None
    turn_rewards: tuple[float, ...] = ()
    turn_states: tuple[int, ...] = ()
    copies: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def ended(self) -> int:
        """Why it ended, as an index into `ENDED`."""
        return ENDED.index(self.fields["environment"]["ended"])
