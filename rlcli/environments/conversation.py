"""One sample's conversation: turns of the policy and of its environment, within limits, as one trajectory."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from rlcli.data.trajectories import Trajectory
from rlcli.environments.environment import Message, Opening, Reply
from rlcli.environments.message_images import placed
from rlcli.environments.tool_calls import Parsed, parse
from rlcli.environments.turn_tokens import TurnTemplate
from rlcli.images.image_rule import ImageRule
from rlcli.types import IMAGE, Ended

if TYPE_CHECKING:
    import numpy as np

Past = Literal["keep", "per_cycle"]
"""keep: the conversation is appended to. per_cycle: where a user's message follows, the chat template renders the past
anew, and what it writes then, without the reasoning of earlier turns as a rule, begins a branch."""
OUT_OF_TOKENS = ("turn_tokens", "drawn_tokens", "tokens")
"""The ends of a conversation that was cut off, as a response is at its limit."""


@dataclass(frozen=True)
class Limits:
    """turns: of the policy. turn_tokens: of one of them. drawn_tokens: of all of them. tokens: of the whole
    conversation, as the policy sees it. sample_tokens: of all branches together. tool_calls: in all. reply_chars: of
    one message of the environment; what is beyond is cut from its middle. seconds: since it began; the turn that
    overruns them is the last."""

    turns: int
    turn_tokens: int
    drawn_tokens: int
    tokens: int
    sample_tokens: int = 1 << 60
    tool_calls: int = 1 << 30
    reply_chars: int = 1 << 30
    seconds: float = math.inf


@dataclass
class Conversation:
    """The state between two turns.

    `drew` takes a turn of the policy and returns the message for the environment; `replied` takes its reply. When
    `ended` is set, nothing follows. past: what becomes of earlier turns once a user speaks again. rule: how the model
    sees pictures, if it does. trajectory: all tokens. rewards: of each turn, with the index of its last drawn token.
    states: `state_of` what the environment wrote before each turn. info: of the last reply. messages: all of them, for
    people to read; copies: of their pictures, by digest. pictures: of all messages, as the model sees them.
    """

    template: TurnTemplate
    limits: Limits
    opening: Opening
    form: str
    opened: bool = False
    past: Past = "keep"
    rule: ImageRule | None = None
    trajectory: Trajectory = field(init=False)
    messages: list[Message] = field(init=False)
    copies: dict[str, bytes] = field(default_factory=dict)
    pictures: list[np.ndarray] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    ended: Ended | None = None
    calls: int = 0
    failed_calls: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.messages = list(self.opening.messages)
        self.states.append(state_of(self.opening.messages))
        self.trajectory = self._first(self.opening.messages, self.opening.pictures)
        self._showed(self.opening)
        if len(self.trajectory.tokens) >= self.limits.tokens:
            self.ended = "tokens"

    @property
    def room(self) -> int:
        """Tokens that the policy may draw in its next turn."""
        limits = self.limits
        left = limits.drawn_tokens - self.trajectory.drawn_tokens, _left(self.trajectory, limits)
        return max(0, min(limits.turn_tokens, *left))

    def drew(self, trajectory: Trajectory, text: str) -> Message:
        """The policy's turn as the environment sees it. trajectory: this one, with the turn drawn. text: the turn's,
        without the token that ended it."""
        self.trajectory = trajectory
        parsed: Parsed = parse(text, self.form, opened=self.opened, tools=self.opening.tools)
        self.failed_calls += parsed.failed
        self.calls += len(parsed.message.get("tool_calls", ()))
        self.messages.append(parsed.message)
        return parsed.message

    def replied(self, reply: Reply) -> None:
        """Take what the environment answered: its reward, and its messages unless the conversation is over."""
        self.rewards.append((self.trajectory.drawn_tokens - 1, reply.reward))
        self.info = reply.info
        self.failed_calls += int(reply.info.get("failed_calls", 0))
        messages = [self._shortened(message) for message in reply.messages]
        self.ended = self._end(reply)
        if self.ended:
            self.messages += messages
            self._showed(reply)
            return
        trajectory = self._followed(messages, reply.pictures)
        if _left(trajectory, self.limits) <= 0:
            self.ended = "tokens"  # what has no room is left out: the last turn drawn is the end
            return
        self.trajectory = trajectory
        self.messages += messages
        self._showed(reply)
        self.states.append(state_of(messages))

    def _first(self, messages: Sequence[Message], pictures: Sequence[np.ndarray]) -> Trajectory:
        return Trajectory.of_prompt(placed(self.template.first(messages), pictures, self.rule), pictures)

    def _followed(self, messages: list[Message], pictures: Sequence[np.ndarray]) -> Trajectory:
        """The trajectory and what these messages, with these pictures, add to it."""
        whole = self.trajectory
        if self.past == "per_cycle" and any(message["role"] == "user" for message in messages):
            said = [*self.messages[len(self.opening.messages) :], *messages]
            past = [*self.opening.messages, *map(self.template.prepared, said)]
            first = self._first(past, [*self.pictures, *pictures])
            return whole.extended("prompt", first.tokens, pictures=first.pictures)
        dropped, tokens = self.template.append(whole.last_turn.tolist(), messages)
        ids = placed(tokens, pictures, self.rule)
        return whole.without_last(dropped).extended("environment", ids, pictures=pictures)

    def _showed(self, answer: Opening | Reply) -> None:
        self.pictures += answer.pictures
        self.copies |= answer.copies

    def _end(self, reply: Reply) -> Ended | None:
        limits, trajectory = self.limits, self.trajectory
        reached: dict[Ended, bool] = {
            "done": reply.done,
            "drawn_tokens": trajectory.drawn_tokens >= limits.drawn_tokens,
            "tokens": _left(trajectory, limits) <= 0 or not reply.fits,
            "turn_tokens": trajectory.stop_reason == "length",
            "turns": trajectory.turns >= limits.turns,
            "tool_calls": self.calls > limits.tool_calls,
            "seconds": time.monotonic() - self.began > limits.seconds,
        }
        return next((reason for reason, is_reached in reached.items() if is_reached), None)

    def _shortened(self, message: Message) -> Message:
        text, most = message["content"], self.limits.reply_chars
        if not message.get("images"):
            return {**message, "content": shortened(text, most)}
        texts = text.split(IMAGE)
        if (length := sum(map(len, texts))) <= most:
            return message
        cut = [shortened(one, max(1, most * len(one) // length)) for one in texts]
        return {**message, "content": IMAGE.join(cut)}

    def finished(self) -> Trajectory:
        """The trajectory, once it has ended: cut off at a limit of tokens, or stopped."""
        return replace(self.trajectory, stop_reason="length" if self.ended in OUT_OF_TOKENS else "stop")

    @property
    def reward(self) -> float:
        """The sum over its turns."""
        return float(sum(reward for _, reward in self.rewards))


def _left(trajectory: Trajectory, limits: Limits) -> int:
    """Tokens until a limit of all tokens."""
    return min(limits.tokens - len(trajectory.branch), limits.sample_tokens - len(trajectory.tokens))


def state_of(messages: Sequence[Message]) -> int:
    """A hash of what an environment writes before a turn, 63 bits: equal for the same roles, names, texts and
    pictures."""
    said = [[message.get(key) for key in ("role", "name", "content")] for message in messages]
    shown = [image["digest"] for message in messages for image in message.get("images", ())]
    return _hashed(json.dumps([*said, *([shown] if shown else [])]).encode())


def states_of(trajectory: Trajectory) -> list[int]:
    """Where no messages are known, a hash of the tokens before each turn of the policy, since its last one: 63 bits."""
    states: list[int] = []
    heard, before = b"", "policy"
    for span in trajectory.spans:
        if span.speaker != "policy":
            heard += trajectory.tokens[span.start : span.end].tobytes()
        elif before != "policy":
            states.append(_hashed(heard))
            heard = b""
        before = span.speaker
    return states


def _hashed(said: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little") >> 1


def shortened(text: str, most: int) -> str:
    """`text` with at most `most` characters: its beginning and its end, and a mark between them.

    >>> shortened("abcdefghij", 5), shortened("abc", 5)
    ('ab…ij', 'abc')
    """
    if len(text) <= most:
        return text
    kept = most - 1
    return text[: kept - kept // 2] + "…" + text[len(text) - kept // 2 :]
