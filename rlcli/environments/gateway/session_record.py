"""What one session drew: its branches, each a trajectory whose tokens are those that the engine saw and drew."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlcli.data.trajectories import Trajectory
from rlcli.environments.conversation import Limits
from rlcli.environments.gateway.chat_protocol import Message, Refused, same
from rlcli.environments.message_images import placed
from rlcli.environments.turn_tokens import TurnTemplate
from rlcli.images.image_rule import ImageRule
from rlcli.types import Ended, FinishReason

OUT_OF_CONTEXT = "context_length_exceeded"
"""OpenAI's code for a conversation that has become too long."""


class Generated(Protocol):
    """What the engine's side returns, as `rlcli.rollout.engine.Generation` has it."""

    @property
    def tokens(self) -> np.ndarray: ...

    @property
    def log_probs(self) -> np.ndarray: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    @property
    def routes(self) -> np.ndarray | None: ...


@dataclass(frozen=True)
class GeneratedTurn:
    """A turn. tokens: int32 `[n]`. log_probs: float32 `[n]`. routes: of all that it follows, too, if any are known."""

    tokens: np.ndarray
    log_probs: np.ndarray
    finish_reason: FinishReason
    routes: np.ndarray | None = None


@dataclass
class Branch:
    """A conversation up to a turn of the policy. messages: with that turn; empty if it was asked for in tokens.
    offered: the tools, as JSON. is_end: nothing that was drawn follows it."""

    trajectory: Trajectory
    messages: list[Message]
    offered: str
    is_end: bool = True


@dataclass(frozen=True)
class Ask:
    """A turn to draw. trajectory: all tokens before it. room: tokens that it may have. is_short: since the request asks
    for no more. extends: the branch that it continues; None if it begins one."""

    trajectory: Trajectory
    room: int
    is_short: bool
    messages: list[Message]
    offered: str
    extends: Branch | None


@dataclass
class Record:
    """All that one session drew. version: of the weights. rule: how the model sees pictures, if it does. copies: of
    those that it was shown, by digest. ended: the limit that refused the last request. calls: of
    tools; failed_calls: those that cannot be read."""

    limits: Limits
    version: int = 0
    rule: ImageRule | None = None
    copies: dict[str, bytes] = field(default_factory=dict)
    turns: list[Branch] = field(default_factory=list)
    ended: Ended | None = None
    calls: int = 0
    failed_calls: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def branches(self) -> list[Branch]:
        """Those that nothing follows, in the order in which they ended. Every drawn token is drawn in one of them."""
        return [branch for branch in self.turns if branch.is_end]

    def ask(
        self,
        messages: list[Message],
        offered: str,
        template: TurnTemplate,
        most: int | None,
        pictures: Mapping[str, np.ndarray] | None = None,
    ) -> Ask:
        """The turn that follows `messages`: what is new is appended to the longest conversation that they continue;
        without one they are rendered, and a branch begins. most: tokens. pictures: digest → as the model sees it, of
        those in the messages. Raises `Refused` (400) at a limit, and `ModelError` if the template fails."""
        pictures = pictures or {}

        def shown(some: list[Message]) -> list[np.ndarray]:
            return [pictures[image["digest"]] for message in some for image in message.get("images", ())]

        known = [b for b in self.turns if b.offered == offered and b.messages and _continues(messages, b.messages)]
        follows = max(known, key=lambda branch: len(branch.messages), default=None)
        if follows is None:
            ids = placed(
                template.first([template.prepared(message) for message in messages]), shown(messages), self.rule
            )
            return self._ask(ids, shown(messages), most, messages, offered)
        past, new = follows.messages, messages[len(follows.messages) :]
        dropped, tokens = template.append(follows.trajectory.last_turn.tolist(), _named(new, past))
        ids = placed(tokens, shown(new), self.rule)
        return self._ask(ids, shown(new), most, [*past, *new], offered, follows, dropped)

    def ask_tokens(self, tokens: list[int], most: int | None) -> Ask:
        """The turn that follows `tokens`, which continue the longest branch that they begin with."""
        known = [b for b in self.turns if len(b.trajectory.tokens) < len(tokens)]
        known = [b for b in known if tokens[: len(b.trajectory.tokens)] == b.trajectory.tokens.tolist()]
        follows = max(known, key=lambda branch: len(branch.trajectory.tokens), default=None)
        new = tokens if follows is None else tokens[len(follows.trajectory.tokens) :]
        if self.rule is not None and not set(self.rule.never).isdisjoint(new):
            raise Refused(400, "token_ids has tokens that stand for pictures: ask for this turn in messages")
        return self._ask(_ids(new), [], most, [], "", follows)

    def drew(self, ask: Ask, turn: GeneratedTurn, message: Message | None) -> None:
        """Record a turn. message: as the client gets it; None if it asked in tokens. A turn is cut off only at a limit
        of the session, not at the request's own."""
        reason = "stop" if ask.is_short else turn.finish_reason
        whole = ask.trajectory.extended("policy", turn.tokens, turn.log_probs, self.version, reason).routed(turn.routes)
        if ask.extends is not None:
            ask.extends.is_end = False
        messages = [] if message is None else [*ask.messages, message]
        self.calls += len((message or {}).get("tool_calls", ()))
        self.turns.append(Branch(whole, messages, ask.offered))

    def _ask(
        self,
        tokens: np.ndarray,
        pictures: Sequence[np.ndarray],
        most: int | None,
        messages: list[Message],
        offered: str,
        follows: Branch | None = None,
        dropped: int = 0,
    ) -> Ask:
        extends = follows if follows is not None and follows.is_end else None
        if extends is not None:
            trajectory = extends.trajectory.without_last(dropped)
            trajectory = trajectory.extended("environment", tokens, pictures=pictures)
        else:  # what another branch drew is context here
            past = [follows.trajectory.without_last(dropped)] if follows is not None else []
            every = np.concatenate([*(one.tokens for one in past), tokens])
            trajectory = Trajectory.of_prompt(every, [*(p for one in past for p in one.pictures), *pictures])
        room = self._room(trajectory, extends)
        return Ask(trajectory, min(room, most or room), most is not None and most < room, messages, offered, extends)

    def _room(self, trajectory: Trajectory, extends: Branch | None) -> int:
        limits = self.limits
        others = sum(len(branch.trajectory.tokens) for branch in self.branches if branch is not extends)
        within = limits.tokens, limits.sample_tokens - others
        left: dict[Ended, float] = {
            "tokens": min(within) - len(trajectory.tokens),
            "drawn_tokens": limits.drawn_tokens - sum(branch.trajectory.drawn_tokens for branch in self.branches),
            "turns": limits.turns - len(self.turns),
            "tool_calls": limits.tool_calls - self.calls + 1,
            "seconds": limits.seconds - (time.monotonic() - self.began),
        }
        self.ended = next((reason for reason, room in left.items() if room <= 0), None)
        if self.ended is not None:
            code = OUT_OF_CONTEXT if self.ended == "tokens" else f"limit_{self.ended}"
            most, all_of = getattr(limits, self.ended), ""
            if self.ended == "tokens" and within[1] < within[0]:
                most, all_of = limits.sample_tokens, ", all its branches together"
            raise Refused(400, f"the session is at its limit of {most} {self.ended}{all_of}", code)
        return int(min(left["tokens"], left["drawn_tokens"], limits.turn_tokens))


def _continues(messages: list[Message], past: list[Message]) -> bool:
    """Whether `messages` begin with `past`, and what follows it was not drawn by the policy."""
    rest = messages[len(past) :]
    is_new = bool(rest) and all(message["role"] != "assistant" for message in rest)
    return is_new and all(same(known, sent) for known, sent in zip(past, messages, strict=False))


def _named(messages: list[Message], past: list[Message]) -> list[Message]:
    """Tools' results with the name of the function that was called, which OpenAI's protocol leaves out."""
    calls = {call["id"]: call["function"]["name"] for message in past for call in message.get("tool_calls", ())}
    return [
        {"name": calls[message["tool_call_id"]], **message} if message.get("tool_call_id") in calls else message
        for message in messages
    ]


def _ids(tokens: Sequence[int]) -> Any:
    return np.array(tokens, np.int32)
