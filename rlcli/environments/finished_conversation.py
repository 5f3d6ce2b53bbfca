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
    """What the engine does next for a sample: continue its tokens."""

    key: int
    """Key of the sample."""
    tokens: np.ndarray
    """int32 `[n]`: tokens to continue."""
    room: int
    """Most tokens of the turn, `begun` included."""
    number: int
    """Number of the turn, from 0."""
    begun: np.ndarray | None = None
    """int32 `[m]`: what an earlier round generated of this turn."""
    pictures: tuple[np.ndarray, ...] = ()
    """Pictures in `tokens`, as the model sees them."""


@dataclass(frozen=True)
class FinishedConversation:
    """A conversation that is over."""

    key: int
    """Key of the sample."""
    whole: Trajectory
    """Its trajectory."""
    fields: Mapping[str, Any]
    """Fields of the verifier's request: the messages, and what the environment reports."""
    tool_calls: int
    """Tool calls of the policy."""
    failed_calls: int
    """Those of them that could not be read or that failed."""
    failure: Verdict | None = None
    """Verdict on a sample whose environment failed; None otherwise."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of its turns by the environment."""
    turn_states: tuple[int, ...] = ()
    """Hash of what the environment had written before each turn."""
    copies: Mapping[str, bytes] = field(default_factory=dict)
    """Digest → a small copy, of the pictures that its messages show."""

    @property
    def ended(self) -> int:
        """Why it ended, as an index into `ENDED`."""
        return ENDED.index(self.fields["environment"]["ended"])
