"""A trajectory: everything generated for one sample, token by token, and which of these tokens the policy drew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

from rlcli.data.expert_routes import continued, padded, unknown
from rlcli.types import FinishReason

if TYPE_CHECKING:
    import numpy as np

Speaker = Literal["prompt", "policy", "environment"]
SPEAKERS: tuple[Speaker, ...] = get_args(Speaker)
"""Whose tokens a span holds: those of a templated prompt, with which a branch begins, those that the policy drew, or
those that the environment added later: a tool's output, a user's message, and the chat template's tokens between two
messages."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one speaker."""

    speaker: Speaker
    """Whose tokens they are."""
    start: int
    """Index of the first one in the trajectory."""
    end: int
    """Index after the last one."""
    version: int | None = None
    """Policy version (number of weight syncs) that generated them; None if the policy did not, or if it is unknown."""
    pictures: int = 0
    """Pictures that they show."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sample's tokens. A response to a prompt is the trajectory with one drawn span, after the prompt. Where the
    past was written anew (an agent's sub-agents and summaries, reasoning that was removed), it has several branches,
    each with a prompt of its own: tokens see those before them in their branch alone.

    The policy draws two tokens, a tool answers with one, and the policy draws the last one with newer weights:

    >>> import numpy as np
    >>> ids, log_probs = np.arange(10, 20, dtype=np.int32), np.full(9, -0.5, np.float32)
    >>> whole = Trajectory.single(ids[:3], ids[3:5], log_probs[:2], version=1)
    >>> whole = whole.extended("environment", ids[5:6]).extended("policy", ids[6:7], log_probs[:1], version=2)
    >>> whole.drawn.tolist()
    [False, False, False, True, True, False, True]
    >>> whole.turn_of_drawn.tolist()
    [0, 0, 1]
    >>> whole.prompt_tokens, whole.drawn_tokens, whole.turns, whole.versions, len(whole.log_probs)
    (3, 3, 2, [1, 2], 3)
    """

    tokens: np.ndarray
    """int32 `[T]`: all tokens."""
    spans: tuple[Span, ...]
    """Consecutive, from 0 to T."""
    log_probs: np.ndarray
    """float32 `[R]`: of the R response tokens (those of policy spans) in their order, in nats, as the engine reported
    them."""
    stop_reason: FinishReason | None = None
    """Why it ended; None if it has not."""
    routes: np.ndarray | None = None
    """Experts of the first tokens, as far as they are known and wanted (`rlcli.data.expert_routes`)."""
    pictures: tuple[np.ndarray, ...] = ()
    """uint8 `[height, width, 3]` each: of all spans, in the order of their tokens (`ImageRule.prepared`)."""

    @classmethod
    def of_prompt(cls, tokens: np.ndarray, pictures: Sequence[np.ndarray] = ()) -> Trajectory:
        """A prompt, without a response yet."""
        import numpy as np

        spans = (Span("prompt", 0, len(tokens), pictures=len(pictures)),)
        return cls(tokens, spans, np.zeros(0, np.float32), pictures=tuple(pictures))

    @classmethod
    def single(
        cls,
        prompt: np.ndarray,
        response: np.ndarray,
        log_probs: np.ndarray,
        *,
        version: int = 0,
        stop_reason: FinishReason | None = "stop",
    ) -> Trajectory:
        """A prompt and one response. log_probs: `[len(response)]`."""
        return cls.of_prompt(prompt).extended("policy", response, log_probs, version, stop_reason)

    def extended(
        self,
        speaker: Speaker,
        tokens: np.ndarray,
        log_probs: np.ndarray | None = None,
        version: int | None = None,
        stop_reason: FinishReason | None = None,
        pictures: Sequence[np.ndarray] = (),
    ) -> Trajectory:
        """This trajectory and the tokens that follow. log_probs, version: given for the policy's tokens alone;
        pictures: never for these. A response that is continued with other weights has a span for each version."""
        import numpy as np

        drawn = 0 if log_probs is None else len(log_probs)
        assert drawn == (len(tokens) if speaker == "policy" else 0), "a log-prob for each drawn token, and for no other"
        last, end = self.spans[-1], len(self.tokens) + len(tokens)
        spans = (*self.spans, Span(speaker, len(self.tokens), end, version, len(pictures)))
        if speaker == last.speaker == "policy" and (version == last.version or not len(tokens)):
            spans = (*self.spans[:-1], replace(last, end=end))
        return replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]),
            spans=spans,
            log_probs=self.log_probs if log_probs is None else np.concatenate([self.log_probs, log_probs]),
            stop_reason=stop_reason,
            pictures=(*self.pictures, *pictures),
        )

    @classmethod
    def joined(cls, branches: Sequence[Trajectory]) -> Trajectory:
        """One sample of several trajectories, which become its branches in this order. It ends as the last one does.

        >>> import numpy as np
        >>> ids, log_probs = np.arange(10, 20, dtype=np.int32), np.full(9, -0.5, np.float32)
        >>> sub = Trajectory.single(ids[:2], ids[2:4], log_probs[:2])
        >>> main = Trajectory.single(ids[:1], ids[5:6], log_probs[:1])
        >>> both = Trajectory.joined([sub, main])
        >>> both.branch_starts, both.tokens.tolist(), both.branch.tolist(), both.turns
        ([0, 4], [10, 11, 12, 13, 10, 15], [10, 15], 2)
        """
        import numpy as np

        spans: list[Span] = []
        for branch in branches:
            at = spans[-1].end if spans else 0
            spans += (replace(span, start=at + span.start, end=at + span.end) for span in branch.spans)
        return cls(
            np.concatenate([branch.tokens for branch in branches]),
            tuple(spans),
            np.concatenate([branch.log_probs for branch in branches]),
            branches[-1].stop_reason,
            _routes_of(branches),
            tuple(picture for branch in branches for picture in branch.pictures),
        )

    @property
    def branch_starts(self) -> list[int]:
        """Where each branch begins."""
        return [span.start for span in self.spans if span.speaker == "prompt"]

    @property
    def branches(self) -> list[Trajectory]:
        """Each branch as a trajectory of its own; only the last one's stop reason is known."""
        first = [place for place, span in enumerate(self.spans) if span.speaker == "prompt"]
        if len(first) == 1:
            return [self]
        found: list[Trajectory] = []
        drawn = shown = 0
        for place, after in pairwise([*first, len(self.spans)]):
            spans = self.spans[place:after]
            start, count = spans[0].start, sum(one.end - one.start for one in spans if one.speaker == "policy")
            moved = tuple(replace(one, start=one.start - start, end=one.end - start) for one in spans)
            routes = None if self.routes is None else self.routes[start : spans[-1].end]
            log_probs = self.log_probs[drawn : drawn + count]
            pictures = self.pictures[shown : shown + _pictures_in(spans)]
            tokens = self.tokens[start : spans[-1].end]
            found.append(Trajectory(tokens, moved, log_probs, routes=routes, pictures=pictures))
            drawn, shown = drawn + count, shown + len(pictures)
        return [*found[:-1], replace(found[-1], stop_reason=self.stop_reason)]

    @property
    def branch(self) -> np.ndarray:
        """The tokens of the last branch, which the next one sees: int32 `[n]`."""
        return self.tokens[self.branch_starts[-1] :]

    @property
    def branch_pictures(self) -> tuple[np.ndarray, ...]:
        """The pictures in the last branch."""
        first = max(place for place, span in enumerate(self.spans) if span.speaker == "prompt")
        return self.pictures[_pictures_in(self.spans[:first]) :]

    @property
    def drawn(self) -> np.ndarray:
        """Which tokens the policy drew: bool `[T]`."""
        import numpy as np

        mask: np.ndarray = np.zeros(len(self.tokens), bool)
        for span in self._drawn_spans:
            mask[span.start : span.end] = True
        return mask

    @property
    def drawn_ids(self) -> np.ndarray:
        """The tokens that the policy drew: int32 `[D]`."""
        drawn: np.ndarray = self.tokens[self.drawn]
        return drawn

    @property
    def last_turn(self) -> np.ndarray:
        """The tokens of the policy's last turn: int32 `[n]`; none if it does not end with one."""
        start = len(self.tokens)
        for span in reversed(self.spans):
            if span.speaker != "policy":
                break
            start = span.start
        return self.tokens[start:]

    def until_turn(self, number: int) -> Trajectory:
        """The beginning of this trajectory to the end of the policy's turn `number`, from 1: all of it if there are no
        more. The turns before the last one of all ended with "stop".

        >>> import numpy as np
        >>> ids, log_probs = np.arange(10, 20, dtype=np.int32), np.full(9, -0.5, np.float32)
        >>> whole = Trajectory.single(ids[:3], ids[3:5], log_probs[:2]).extended("environment", ids[5:6])
        >>> whole = whole.extended("policy", ids[6:8], log_probs[:2], version=2)
        >>> [len(whole.until_turn(number).tokens) for number in (1, 2, 3)]
        [5, 8, 8]
        """
        spoken = 0
        for index, span in enumerate(self.spans):
            if span.speaker != "policy" and index and self.spans[index - 1].speaker == "policy":
                spoken += 1
                if spoken == number:
                    drawn = sum(one.end - one.start for one in self.spans[:index] if one.speaker == "policy")
                    log_probs, routes = self.log_probs[:drawn], self._first_routes(span.start)
                    first = Trajectory(self.tokens[: span.start], self.spans[:index], log_probs, "stop", routes)
                    return replace(first, pictures=self.pictures[: _pictures_in(first.spans)])
        return self

    def without_last(self, count: int) -> Trajectory:
        """This trajectory without its last `count` tokens, which are of its last span and drawn."""
        if not count:
            return self
        last, end = self.spans[-1], len(self.tokens) - count
        assert last.speaker == "policy", "only drawn tokens are taken back"
        assert end >= last.start, "only tokens of the last span are taken back"
        return replace(
            self,
            tokens=self.tokens[:end],
            spans=(*self.spans[:-1], replace(last, end=end)),
            log_probs=self.log_probs[:-count],
            routes=self._first_routes(end),
        )

    def routed(self, routes: np.ndarray | None) -> Trajectory:
        """The same with the routes of the last branch's first tokens, where its own are not known."""
        import numpy as np

        start = self.branch_starts[-1]
        if routes is None:
            return self
        past = unknown(start, routes) if self.routes is None else padded(self.routes, start)
        known = None if self.routes is None else self.routes[start:]
        both = continued(known, routes[: len(self.tokens) - start])  # the end of a turn may have been dropped
        return replace(self, routes=np.concatenate([past, both]))

    def _first_routes(self, tokens: int) -> np.ndarray | None:
        return None if self.routes is None else self.routes[:tokens]

    def dated(self, version: int) -> Trajectory:
        """The same with this version where a drawn span has none (in partial rollouts of older checkpoints)."""
        if None not in self.versions:
            return self
        return replace(
            self, spans=tuple(replace(s, version=version) if s.speaker == "policy" else s for s in self.spans)
        )

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the first drawn span: those that all samples of a group share, except an agent's."""
        return next((span.start for span in self._drawn_spans), len(self.tokens))

    @property
    def drawn_tokens(self) -> int:
        return len(self.log_probs)

    @property
    def turns(self) -> int:
        """How often the policy spoke. A continued response is one turn."""
        before = (None, *(span.speaker for span in self.spans[:-1]))
        return sum(span.speaker == "policy" != speaker for span, speaker in zip(self.spans, before, strict=True))

    @property
    def turn_of_drawn(self) -> np.ndarray:
        """The turn, from 0, of each drawn token: int64 `[D]`."""
        import numpy as np

        found: list[np.ndarray] = [np.zeros(0, np.int64)]
        turn = -1
        before: Speaker | None = None
        for span in self.spans:
            if span.speaker == "policy":
                turn += before != "policy"
                found.append(np.full(span.end - span.start, turn))
            before = span.speaker
        turns: np.ndarray = np.concatenate(found)
        return turns

    @property
    def versions(self) -> list[int | None]:
        """The version of each drawn span, in their order."""
        return [span.version for span in self._drawn_spans]

    def drawn_by(self, version: int) -> int:
        """How many tokens this version drew."""
        return sum(span.end - span.start for span in self._drawn_spans if span.version == version)

    @property
    def _drawn_spans(self) -> list[Span]:
        return [span for span in self.spans if span.speaker == "policy"]


def _pictures_in(spans: Sequence[Span]) -> int:
    return sum(span.pictures for span in spans)


def _routes_of(branches: Sequence[Trajectory]) -> np.ndarray | None:
    """Those of trajectories that become branches of one: of all tokens, if any are known."""
    import numpy as np

    known = next((branch.routes for branch in branches if branch.routes is not None), None)
    if known is None:
        return None
    none = unknown(0, known)
    parts = [padded(none if branch.routes is None else branch.routes, len(branch.tokens)) for branch in branches]
    routes: np.ndarray = np.concatenate(parts)
    return routes
