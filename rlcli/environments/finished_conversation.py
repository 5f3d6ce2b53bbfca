"""Records of a round of conversations: turns for the engine, and finished conversations for the verifiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Required, TypedDict

from rlcli.data.trajectories import Trajectory
from rlcli.types import ENDED, Ended, Verdict

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32, UInt8

    from rlcli.environments.environment import Message


@dataclass(frozen=True)
class Turn:
    """The next turn of a sample, for the engine to generate."""

    key: int
    """Key of the sample."""
    tokens: Int32[np.ndarray, " T"]
    """Tokens to continue."""
    room: int
    """Most tokens of the turn, `response_prefix` included."""
    number: int
    """Number of the turn, from 0."""
    response_prefix: Int32[np.ndarray, " R"] | None = None
    """Tokens of this turn that an earlier round generated."""
    images: tuple[UInt8[np.ndarray, "height width 3"], ...] = ()
    """Images in `tokens`, preprocessed for the model."""


class EnvironmentReport(TypedDict, total=False):
    """An environment's report on a conversation, for verifiers (`VerifyRequest.environment`)."""

    rewards: list[float]
    """Reward of each step."""
    ended: Required[Ended]
    """Why the conversation ended."""
    info: dict[str, object]
    """The `info` of the last step."""


class RequestFields(TypedDict, total=False):
    """Fields that a conversation adds to the verifier's request."""

    conversation: Sequence[Message]
    """All messages."""
    environment: Required[EnvironmentReport]
    """The environment's report."""


@dataclass(frozen=True)
class FinishedConversation:
    """A conversation that has ended."""

    key: int
    """Key of the sample."""
    trajectory: Trajectory
    """Its trajectory."""
    fields: RequestFields
    """Further fields of the verifier's request."""
    tool_calls: int
    """Tool calls of the policy."""
    failed_calls: int
    """Tool calls that could not be read or that failed."""
    failure: Verdict | None = None
    """Verdict on a sample whose environment failed; None otherwise."""
    turn_rewards: tuple[float, ...] = ()
    """The environment's reward for each turn."""
    turn_states: tuple[int, ...] = ()
    """Hash of the environment's messages before each turn."""
    copies: Mapping[str, bytes] = field(default_factory=dict)
    """Digest → small copy, of the images in its messages."""

    @classmethod
    def failed(cls, key: int, prompt: Trajectory, version: int, failure: Verdict) -> FinishedConversation:
        """A sample whose environment or agent failed. Its tokens are excluded everywhere: only `prompt` is kept."""
        import numpy as np

        no_tokens, no_log_probs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return cls(
            key=key,
            trajectory=prompt.extended("policy", no_tokens, no_log_probs, version, "stop"),
            fields={"environment": {"ended": "failed"}},
            tool_calls=0,
            failed_calls=0,
            failure=failure,
        )

    @property
    def ended(self) -> int:
        """Why it ended, as an index into `ENDED`."""
        return ENDED.index(self.fields["environment"]["ended"])
