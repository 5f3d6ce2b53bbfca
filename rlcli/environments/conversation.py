"""One sample's conversation: turns of the policy and of its environment, within limits, as one trajectory."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from rlcli.data.trajectories import Trajectory
from rlcli.environments.calls import Parsed, parse
from rlcli.environments.chat_messages import Message, TemplateMessage
from rlcli.environments.environment import Opening, Reply
from rlcli.environments.message_images import expand_images
from rlcli.environments.turn_tokens import TurnTemplate
from rlcli.images.image_rule import ImageRule
from rlcli.support.json_types import JsonValue
from rlcli.types import IMAGE, Ended

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import UInt8

Past = Literal["keep", "per_cycle"]
"""Treatment of earlier turns. keep: the conversation is appended to. per_cycle: when a user's message follows, the chat
template renders all earlier messages again, usually without the reasoning of earlier turns, which starts a branch."""
OUT_OF_TOKENS = ("turn_tokens", "response_tokens", "tokens")
"""Values of `ended` of a truncated conversation."""


@dataclass(frozen=True)
class Limits:
    """Limits of a conversation."""

    turns: int
    """Turns of the policy."""
    turn_tokens: int
    """Tokens of one turn."""
    response_tokens: int
    """Tokens of all turns of the policy."""
    tokens: int
    """Tokens of the conversation, as the policy sees it."""
    sample_tokens: int = 1 << 60
    """Tokens of all branches together."""
    tool_calls: int = 1 << 30
    """Tool calls in all turns."""
    reply_chars: int = 1 << 30
    """Characters of one message of the environment; longer ones are shortened in the middle."""
    seconds: float = math.inf
    """Duration; the turn that exceeds it is the last."""


@dataclass
class Conversation:
    """One sample's conversation between two turns: `add_turn` adds a turn of the policy and returns the message for the
    environment; `add_reply` adds the environment's reply."""

    template: TurnTemplate
    """The chat template."""
    limits: Limits
    """Its limits."""
    opening: Opening
    """The environment's first messages."""
    form: str
    """Format of tool calls (`rlcli.environments.calls.FORMATS`); empty: no tools."""
    thinking: bool = False
    """True if the prompt ends within an open <think>."""
    past: Past = "keep"
    """Treatment of earlier turns when a user's message follows."""
    rule: ImageRule | None = None
    """Preprocessing of images, for a model that takes images."""
    trajectory: Trajectory = field(init=False)
    """All tokens."""
    messages: list[Message] = field(init=False)
    """All messages."""
    copies: dict[str, bytes] = field(default_factory=dict)
    """Digest → small copy, of the images in the messages."""
    images: list[UInt8[np.ndarray, "height width 3"]] = field(default_factory=list)
    """Images of all messages, preprocessed for the model."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """Index of a turn's last response token, and the turn's reward."""
    states: list[int] = field(default_factory=list)
    """`state_of` the environment's messages before each turn."""
    ended: Ended | None = None
    """Why it ended; None while it continues."""
    calls: int = 0
    """Tool calls of the policy."""
    failed_calls: int = 0
    """Tool calls that could not be read or that failed."""
    info: Mapping[str, JsonValue] = field(default_factory=dict)
    """`info` of the last reply."""
    start_time: float = field(default_factory=time.monotonic)
    """Start, by the monotonic clock."""

    def __post_init__(self) -> None:
        self.messages = list(self.opening.messages)
        self.states.append(state_of(self.opening.messages))
        self.trajectory = self._prompt(self.opening.messages, self.opening.processed_images)
        self._add_images(self.opening)
        if len(self.trajectory.tokens) >= self.limits.tokens:
            self.ended = "tokens"

    @property
    def room(self) -> int:
        """Maximum number of tokens of the policy's next turn."""
        limits = self.limits
        remaining = limits.response_tokens - self.trajectory.response_tokens
        return max(0, min(limits.turn_tokens, remaining, _remaining_tokens(self.trajectory, limits)))

    def add_turn(self, trajectory: Trajectory, text: str) -> Message:
        """Add a turn of the policy; returns its message for the environment. trajectory: extended by the turn. text: of
        the turn, without the token that ended it."""
        self.trajectory = trajectory
        parsed: Parsed = parse(text, self.form, thinking=self.thinking, tools=self.opening.tools)
        self.failed_calls += parsed.failed
        self.calls += len(parsed.message.get("tool_calls", ()))
        self.messages.append(parsed.message)
        return parsed.message

    def add_reply(self, reply: Reply) -> None:
        """Add the environment's reply: its reward, and its messages unless the conversation has ended."""
        self.rewards.append((self.trajectory.response_tokens - 1, reply.reward))
        self.info = reply.info
        self.failed_calls += reply.failed_calls
        messages = [self._shortened(message) for message in reply.messages]
        self.ended = self._end(reply)
        if self.ended:
            self.messages += messages
            self._add_images(reply)
            return
        trajectory = self._extended(messages, reply.processed_images)
        if _remaining_tokens(trajectory, self.limits) <= 0:
            self.ended = "tokens"  # messages without room are dropped: the trajectory ends with the last turn
            return
        self.trajectory = trajectory
        self.messages += messages
        self._add_images(reply)
        self.states.append(state_of(messages))

    def _prompt(self, messages: Sequence[TemplateMessage], images: Sequence[np.ndarray]) -> Trajectory:
        return Trajectory.of_prompt(expand_images(self.template.first(messages), images, self.rule), images)

    def _extended(self, messages: list[Message], images: Sequence[np.ndarray]) -> Trajectory:
        """The trajectory, extended by messages of the environment with these images."""
        trajectory = self.trajectory
        if self.past == "per_cycle" and any(message["role"] == "user" for message in messages):
            later_messages = [*self.messages[len(self.opening.messages) :], *messages]
            rendered = [*self.opening.messages, *map(self.template.prepared, later_messages)]
            branch = self._prompt(rendered, [*self.images, *images])
            return trajectory.extended("prompt", branch.tokens, images=branch.images)
        dropped, tokens = self.template.append(trajectory.last_turn.tolist(), messages)
        ids = expand_images(tokens, images, self.rule)
        return trajectory.without_last(dropped).extended("environment", ids, images=images)

    def _add_images(self, answer: Opening | Reply) -> None:
        self.images += answer.processed_images
        self.copies |= answer.copies

    def _end(self, reply: Reply) -> Ended | None:
        limits, trajectory = self.limits, self.trajectory
        reached: dict[Ended, bool] = {
            "done": reply.done,
            "response_tokens": trajectory.response_tokens >= limits.response_tokens,
            "tokens": _remaining_tokens(trajectory, limits) <= 0 or not reply.fits,
            "turn_tokens": trajectory.stop_reason == "length",
            "turns": trajectory.turns >= limits.turns,
            "tool_calls": self.calls > limits.tool_calls,
            "seconds": time.monotonic() - self.start_time > limits.seconds,
        }
        return next((reason for reason, is_reached in reached.items() if is_reached), None)

    def _shortened(self, message: Message) -> Message:
        text, limit = message["content"], self.limits.reply_chars
        if not message.get("images"):
            return {**message, "content": shortened(text, limit)}
        parts = text.split(IMAGE)
        if (length := sum(map(len, parts))) <= limit:
            return message
        parts = [shortened(part, max(1, limit * len(part) // length)) for part in parts]
        return {**message, "content": IMAGE.join(parts)}

    def finished(self) -> Trajectory:
        """The trajectory of an ended conversation, with its stop reason: truncated at a limit of tokens, or stopped."""
        return replace(self.trajectory, stop_reason="length" if self.ended in OUT_OF_TOKENS else "stop")

    @property
    def reward(self) -> float:
        """Sum of the rewards of its turns."""
        return float(sum(reward for _, reward in self.rewards))


def _remaining_tokens(trajectory: Trajectory, limits: Limits) -> int:
    """Number of tokens until a limit of all tokens."""
    return min(limits.tokens - len(trajectory.branch), limits.sample_tokens - len(trajectory.tokens))


def state_of(messages: Sequence[Message]) -> int:
    """A 63-bit hash of an environment's messages before a turn: equal for the same roles, names, texts and images."""
    texts = [[message.get(key) for key in ("role", "name", "content")] for message in messages]
    images = [image["digest"] for message in messages for image in message.get("images", ())]
    return _hash_of(json.dumps([*texts, *([images] if images else [])]).encode())


def states_of(trajectory: Trajectory) -> list[int]:
    """A 63-bit hash of the tokens between the last turn of the policy and each turn, for a conversation whose messages
    are not known."""
    states: list[int] = []
    tokens, last_speaker = b"", "policy"
    for span in trajectory.spans:
        if span.speaker != "policy":
            tokens += trajectory.tokens[span.start : span.end].tobytes()
        elif last_speaker != "policy":
            states.append(_hash_of(tokens))
            tokens = b""
        last_speaker = span.speaker
    return states


def _hash_of(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def shortened(text: str, limit: int) -> str:
    """`text` with at most `limit` characters: its start and its end, with an ellipsis between them.

    >>> shortened("abcdefghij", 5), shortened("abc", 5)
    ('ab…ij', 'abc')
    """
    if len(text) <= limit:
        return text
    length = limit - 1
    return text[: length - length // 2] + "…" + text[len(text) - length // 2 :]
