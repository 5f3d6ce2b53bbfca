"""Record of one session: its branches, each a trajectory with exactly the tokens that the engine read and generated."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rlcli.data.trajectories import Trajectory
from rlcli.environments.chat_messages import Message
from rlcli.environments.conversation import Limits
from rlcli.environments.gateway.chat_protocol import Refused, same
from rlcli.environments.message_images import expand_images
from rlcli.environments.turn_tokens import TurnTemplate
from rlcli.images.image_rule import ImageRule
from rlcli.types import Ended, FinishReason

if TYPE_CHECKING:
    from jaxtyping import Float32, Int32, UInt

OUT_OF_CONTEXT = "context_length_exceeded"
"""OpenAI's code for a conversation that has become too long."""


class Generated(Protocol):
    """The engine's result, as `rlcli.rollout.engine.Generation`."""

    @property
    def tokens(self) -> Int32[np.ndarray, " R"]: ...

    @property
    def log_probs(self) -> Float32[np.ndarray, " R"]: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    @property
    def routes(self) -> UInt[np.ndarray, "T layers chosen"] | None: ...


@dataclass(frozen=True)
class GeneratedTurn:
    """A finished turn."""

    tokens: Int32[np.ndarray, " R"]
    """Its tokens."""
    log_probs: Float32[np.ndarray, " R"]
    """Their log-probs."""
    finish_reason: FinishReason
    """Why it ended."""
    routes: UInt[np.ndarray, "T layers chosen"] | None = None
    """Experts of its tokens and of those before it, as far as they are known."""


@dataclass
class Branch:
    """A conversation up to a turn of the policy."""

    trajectory: Trajectory
    """Its tokens, with that turn."""
    messages: list[Message]
    """Its messages, with that turn; empty if the turn was requested in tokens."""
    offered: str
    """The tools, as JSON."""
    is_end: bool = True
    """True if no later turn extends it."""


@dataclass(frozen=True)
class TurnRequest:
    """A turn to generate."""

    trajectory: Trajectory
    """All tokens before it."""
    room: int
    """Maximum number of its tokens."""
    is_short: bool
    """True if the request itself limits its tokens, not the session."""
    messages: list[Message]
    """Messages before it; empty if it is requested in tokens."""
    offered: str
    """The tools, as JSON."""
    extends: Branch | None
    """The branch that it continues; None if it starts one."""


@dataclass
class Record:
    """All turns of one session."""

    limits: Limits
    """Limits of the session."""
    version: int = 0
    """Policy version of the engine."""
    rule: ImageRule | None = None
    """Preprocessing of images, for a model that takes images."""
    copies: dict[str, bytes] = field(default_factory=dict)
    """Digest → small copy, of the images in its messages."""
    turns: list[Branch] = field(default_factory=list)
    """The conversation up to each turn."""
    ended: Ended | None = None
    """The limit that refused the last request."""
    calls: int = 0
    """Tool calls of the policy."""
    failed_calls: int = 0
    """Tool calls that could not be read."""
    start_time: float = field(default_factory=time.monotonic)
    """Start, by the monotonic clock."""

    @property
    def branches(self) -> list[Branch]:
        """Branches that no turn extends, in the order in which they ended. Each response token is in one of them as
        such."""
        return [branch for branch in self.turns if branch.is_end]

    def ask(
        self,
        messages: list[Message],
        offered: str,
        template: TurnTemplate,
        max_tokens: int | None,
        images: Mapping[str, np.ndarray] | None = None,
    ) -> TurnRequest:
        """The turn that follows `messages`. New messages are appended to the longest recorded conversation that they
        continue; without one, all messages are rendered, and a branch starts. images: digest → preprocessed image, of
        the messages. Raises `Refused` (400) at a limit, and `ModelError` if the template fails."""
        images = images or {}

        def images_of(part: list[Message]) -> list[np.ndarray]:
            return [images[image["digest"]] for message in part for image in message.get("images", ())]

        known = [b for b in self.turns if b.offered == offered and b.messages and _continues(messages, b.messages)]
        follows = max(known, key=lambda branch: len(branch.messages), default=None)
        if follows is None:
            ids = expand_images(
                template.first([template.prepared(message) for message in messages]), images_of(messages), self.rule
            )
            return self._ask(ids, images_of(messages), max_tokens, messages, offered)
        past, new = follows.messages, messages[len(follows.messages) :]
        dropped, tokens = template.append(follows.trajectory.last_turn.tolist(), _named(new, past))
        ids = expand_images(tokens, images_of(new), self.rule)
        return self._ask(ids, images_of(new), max_tokens, [*past, *new], offered, follows, dropped)

    def ask_tokens(self, tokens: list[int], max_tokens: int | None) -> TurnRequest:
        """The turn that follows `tokens`, which continue the longest branch that is a prefix of them."""
        known = [b for b in self.turns if len(b.trajectory.tokens) < len(tokens)]
        known = [b for b in known if tokens[: len(b.trajectory.tokens)] == b.trajectory.tokens.tolist()]
        follows = max(known, key=lambda branch: len(branch.trajectory.tokens), default=None)
        new = tokens if follows is None else tokens[len(follows.trajectory.tokens) :]
        if self.rule is not None and not set(self.rule.never).isdisjoint(new):
            raise Refused(400, "token_ids has tokens that stand for images: ask for this turn in messages")
        return self._ask(np.array(new, np.int32), [], max_tokens, [], "", follows)

    def record_turn(self, request: TurnRequest, turn: GeneratedTurn, message: Message | None) -> None:
        """Record a turn. message: as sent to the client; None if it was requested in tokens. A turn counts as truncated
        only at a limit of the session, not at the request's own."""
        reason = "stop" if request.is_short else turn.finish_reason
        trajectory = request.trajectory.extended("policy", turn.tokens, turn.log_probs, self.version, reason)
        if request.extends is not None:
            request.extends.is_end = False
        messages = [] if message is None else [*request.messages, message]
        self.calls += 0 if message is None else len(message.get("tool_calls", ()))
        self.turns.append(Branch(trajectory.with_routes(turn.routes), messages, request.offered))

    def _ask(
        self,
        tokens: np.ndarray,
        images: Sequence[np.ndarray],
        max_tokens: int | None,
        messages: list[Message],
        offered: str,
        follows: Branch | None = None,
        dropped: int = 0,
    ) -> TurnRequest:
        extends = follows if follows is not None and follows.is_end else None
        if extends is not None:
            trajectory = extends.trajectory.without_last(dropped)
            trajectory = trajectory.extended("environment", tokens, images=images)
        elif follows is not None:  # the turns of another branch are context here
            past = follows.trajectory.without_last(dropped)
            trajectory = Trajectory.of_prompt(np.concatenate([past.tokens, tokens]), [*past.images, *images])
        else:
            trajectory = Trajectory.of_prompt(tokens, images)
        room = self._room(trajectory, extends)
        is_short = max_tokens is not None and max_tokens < room
        return TurnRequest(trajectory, min(room, max_tokens or room), is_short, messages, offered, extends)

    def _room(self, trajectory: Trajectory, extends: Branch | None) -> int:
        limits = self.limits
        others = sum(len(branch.trajectory.tokens) for branch in self.branches if branch is not extends)
        within = limits.tokens, limits.sample_tokens - others
        remaining: dict[Ended, float] = {
            "tokens": min(within) - len(trajectory.tokens),
            "response_tokens": limits.response_tokens
            - sum(branch.trajectory.response_tokens for branch in self.branches),
            "turns": limits.turns - len(self.turns),
            "tool_calls": limits.tool_calls - self.calls + 1,
            "seconds": limits.seconds - (time.monotonic() - self.start_time),
        }
        self.ended = next((reason for reason, room in remaining.items() if room <= 0), None)
        if self.ended is not None:
            code = OUT_OF_CONTEXT if self.ended == "tokens" else f"limit_{self.ended}"
            limit, scope = getattr(limits, self.ended), ""
            if self.ended == "tokens" and within[1] < within[0]:
                limit, scope = limits.sample_tokens, ", all its branches together"
            raise Refused(400, f"the session is at its limit of {limit} {self.ended}{scope}", code)
        return int(min(remaining["tokens"], remaining["response_tokens"], limits.turn_tokens))


def _continues(messages: list[Message], past: list[Message]) -> bool:
    """True if `messages` start with `past`, and continue with messages that are not the policy's."""
    rest = messages[len(past) :]
    is_new = bool(rest) and all(message["role"] != "assistant" for message in rest)
    return is_new and all(same(known, sent) for known, sent in zip(past, messages, strict=False))


def _named(messages: list[Message], past: list[Message]) -> list[Message]:
    """Add the name of the called function to tool results, which OpenAI's protocol leaves out."""
    calls = {call["id"]: call["function"]["name"] for message in past for call in message.get("tool_calls", ())}
    return [
        {"name": calls[message["tool_call_id"]], **message} if message.get("tool_call_id") in calls else message
        for message in messages
    ]
