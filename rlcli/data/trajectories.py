"""A trajectory: all tokens of one sample, and which of them the policy generated (response tokens)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

from rlcli.data.expert_routes import continued, padded, unknown
from rlcli.types import FinishReason

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, Float32, Int32, Int64, UInt8

    from rlcli.data.expert_routes import Routes

Speaker = Literal["prompt", "policy", "environment"]
SPEAKERS: tuple[Speaker, ...] = get_args(Speaker)
"""Source of a span's tokens: a templated prompt, with which a branch begins; the policy; or the environment, which adds
a tool's output, a user's message, and the chat template's tokens between two messages."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one speaker."""

    speaker: Speaker
    """Source of the tokens."""
    start: int
    """Index of the first token in the trajectory."""
    end: int
    """Index after the last token."""
    version: int | None = None
    """Policy version (number of weight syncs) that generated them; None if the policy did not, or if it is unknown."""
    image_count: int = 0
    """Number of images among the tokens."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sample's tokens. A response to a prompt is the trajectory with one policy span, after the prompt. Where the
    context was rewritten (an agent's sub-agents and summaries, reasoning that was removed), it has several branches,
    each with a separate prompt: tokens attend to those before them in their branch alone.

    The policy generates two tokens, a tool answers with one, and the policy generates the last one with newer weights:

    >>> import numpy as np
    >>> ids, log_probs = np.arange(10, 20, dtype=np.int32), np.full(9, -0.5, np.float32)
    >>> whole = Trajectory.single(ids[:3], ids[3:5], log_probs[:2], version=1)
    >>> whole = whole.extended("environment", ids[5:6]).extended("policy", ids[6:7], log_probs[:1], version=2)
    >>> whole.drawn.tolist()
    [False, False, False, True, True, False, True]
    >>> whole.turn_of_drawn.tolist()
    [0, 0, 1]
    >>> whole.prompt_tokens, whole.response_tokens, whole.turns, whole.versions, len(whole.log_probs)
    (3, 3, 2, [1, 2], 3)
    """

    tokens: Int32[np.ndarray, " T"]
    """Token ids of all spans."""
    spans: tuple[Span, ...]
    """Consecutive spans, from 0 to T."""
    log_probs: Float32[np.ndarray, " R"]
    """Log-probs of the R response tokens (those of policy spans), in their order, in nats, as the engine reported
    them."""
    stop_reason: FinishReason | None = None
    """Why it ended; None if it has not."""
    routes: Routes | None = None
    """Experts of the first tokens, as far as they are known and recorded (`rlcli.data.expert_routes`)."""
    images: tuple[UInt8[np.ndarray, "height width 3"], ...] = ()
    """Images of all spans, in the order of their tokens, resized for the model (`ImageRule.preprocess`)."""

    @classmethod
    def of_prompt(
        cls, tokens: Int32[np.ndarray, " T"], images: Sequence[UInt8[np.ndarray, "height width 3"]] = ()
    ) -> Trajectory:
        """A prompt, without a response yet."""
        import numpy as np

        spans = (Span("prompt", 0, len(tokens), image_count=len(images)),)
        return cls(tokens, spans, np.zeros(0, np.float32), images=tuple(images))

    @classmethod
    def single(
        cls,
        prompt: Int32[np.ndarray, " n"],
        response: Int32[np.ndarray, " R"],
        log_probs: Float32[np.ndarray, " R"],
        *,
        version: int = 0,
        stop_reason: FinishReason | None = "stop",
    ) -> Trajectory:
        """A prompt and one response."""
        return cls.of_prompt(prompt).extended("policy", response, log_probs, version, stop_reason)

    def extended(
        self,
        speaker: Speaker,
        tokens: Int32[np.ndarray, " n"],
        log_probs: Float32[np.ndarray, " n"] | None = None,
        version: int | None = None,
        stop_reason: FinishReason | None = None,
        images: Sequence[UInt8[np.ndarray, "height width 3"]] = (),
    ) -> Trajectory:
        """Append tokens. Only the policy's tokens have `log_probs` and a `version`, only others have `images`. A
        response that is continued with other weights has a span for each version."""
        import numpy as np

        policy_tokens = 0 if log_probs is None else len(log_probs)
        assert policy_tokens == (len(tokens) if speaker == "policy" else 0), (
            "a log-prob for each drawn token, and for no other"
        )
        last, end = self.spans[-1], len(self.tokens) + len(tokens)
        spans = (*self.spans, Span(speaker, len(self.tokens), end, version, len(images)))
        if speaker == last.speaker == "policy" and (version == last.version or not len(tokens)):
            spans = (*self.spans[:-1], replace(last, end=end))
        return replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]),
            spans=spans,
            log_probs=self.log_probs if log_probs is None else np.concatenate([self.log_probs, log_probs]),
            stop_reason=stop_reason,
            images=(*self.images, *images),
        )

    @classmethod
    def joined(cls, branches: Sequence[Trajectory]) -> Trajectory:
        """Join several trajectories, which become the branches of one sample. Its stop reason is that of the last one.

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
            tuple(image for branch in branches for image in branch.images),
        )

    @property
    def branch_starts(self) -> list[int]:
        """Index of the first token of each branch."""
        return [span.start for span in self.spans if span.speaker == "prompt"]

    @property
    def branches(self) -> list[Trajectory]:
        """Each branch as a separate trajectory; only the last one's stop reason is known."""
        starts = [index for index, span in enumerate(self.spans) if span.speaker == "prompt"]
        if len(starts) == 1:
            return [self]
        result: list[Trajectory] = []
        log_prob_start = image_start = 0
        for index, next_index in pairwise([*starts, len(self.spans)]):
            spans = self.spans[index:next_index]
            start, count = spans[0].start, sum(s.end - s.start for s in spans if s.speaker == "policy")
            moved = tuple(replace(s, start=s.start - start, end=s.end - start) for s in spans)
            routes = None if self.routes is None else self.routes[start : spans[-1].end]
            log_probs = self.log_probs[log_prob_start : log_prob_start + count]
            images = self.images[image_start : image_start + _images_in(spans)]
            tokens = self.tokens[start : spans[-1].end]
            result.append(Trajectory(tokens, moved, log_probs, routes=routes, images=images))
            log_prob_start, image_start = log_prob_start + count, image_start + len(images)
        return [*result[:-1], replace(result[-1], stop_reason=self.stop_reason)]

    @property
    def branch(self) -> Int32[np.ndarray, " n"]:
        """The tokens of the last branch, which are the context of the next token."""
        return self.tokens[self.branch_starts[-1] :]

    @property
    def branch_images(self) -> tuple[UInt8[np.ndarray, "height width 3"], ...]:
        """The images in the last branch."""
        first = max(index for index, span in enumerate(self.spans) if span.speaker == "prompt")
        return self.images[_images_in(self.spans[:first]) :]

    @property
    def drawn(self) -> Bool[np.ndarray, " T"]:
        """Response mask: true for the tokens that the policy generated."""
        import numpy as np

        mask: np.ndarray = np.zeros(len(self.tokens), bool)
        for span in self._drawn_spans:
            mask[span.start : span.end] = True
        return mask

    @property
    def drawn_ids(self) -> Int32[np.ndarray, " R"]:
        """The response tokens."""
        ids: np.ndarray = self.tokens[self.drawn]
        return ids

    @property
    def last_turn(self) -> Int32[np.ndarray, " n"]:
        """The tokens of the policy's last turn; empty if the trajectory does not end with one."""
        start = len(self.tokens)
        for span in reversed(self.spans):
            if span.speaker != "policy":
                break
            start = span.start
        return self.tokens[start:]

    def until_turn(self, number: int) -> Trajectory:
        """The prefix up to the end of the policy's turn `number`, from 1; the whole trajectory if it has fewer turns.
        The stop reason of all turns but the last one is "stop".

        >>> import numpy as np
        >>> ids, log_probs = np.arange(10, 20, dtype=np.int32), np.full(9, -0.5, np.float32)
        >>> whole = Trajectory.single(ids[:3], ids[3:5], log_probs[:2]).extended("environment", ids[5:6])
        >>> whole = whole.extended("policy", ids[6:8], log_probs[:2], version=2)
        >>> [len(whole.until_turn(number).tokens) for number in (1, 2, 3)]
        [5, 8, 8]
        """
        turns = 0
        for index, span in enumerate(self.spans):
            if span.speaker != "policy" and index and self.spans[index - 1].speaker == "policy":
                turns += 1
                if turns == number:
                    policy_tokens = sum(s.end - s.start for s in self.spans[:index] if s.speaker == "policy")
                    log_probs, routes = self.log_probs[:policy_tokens], self._first_routes(span.start)
                    first = Trajectory(self.tokens[: span.start], self.spans[:index], log_probs, "stop", routes)
                    return replace(first, images=self.images[: _images_in(first.spans)])
        return self

    def without_last(self, count: int) -> Trajectory:
        """Remove the last `count` tokens, which must be response tokens of the last span."""
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

    def routed(self, routes: Routes | None) -> Trajectory:
        """Fill in the routes of the last branch's first tokens, where they are not known."""
        import numpy as np

        start = self.branch_starts[-1]
        if routes is None:
            return self
        past = unknown(start, routes) if self.routes is None else padded(self.routes, start)
        known = None if self.routes is None else self.routes[start:]
        last_branch = continued(known, routes[: len(self.tokens) - start])  # the end of a turn may have been dropped
        return replace(self, routes=np.concatenate([past, last_branch]))

    def _first_routes(self, tokens: int) -> Routes | None:
        return None if self.routes is None else self.routes[:tokens]

    def dated(self, version: int) -> Trajectory:
        """Set this version where a policy span has none (in partial rollouts of older checkpoints)."""
        if None not in self.versions:
            return self
        return replace(
            self, spans=tuple(replace(s, version=version) if s.speaker == "policy" else s for s in self.spans)
        )

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the first response token; all samples of a group share them, except an agent's."""
        return next((span.start for span in self._drawn_spans), len(self.tokens))

    @property
    def response_tokens(self) -> int:
        """R, the number of response tokens."""
        return len(self.log_probs)

    @property
    def turns(self) -> int:
        """Number of turns of the policy. A continued response is one turn."""
        previous = (None, *(span.speaker for span in self.spans[:-1]))
        return sum(span.speaker == "policy" != speaker for span, speaker in zip(self.spans, previous, strict=True))

    @property
    def turn_of_drawn(self) -> Int64[np.ndarray, " R"]:
        """The turn, from 0, of each response token."""
        import numpy as np

        parts: list[np.ndarray] = [np.zeros(0, np.int64)]
        turn = -1
        previous: Speaker | None = None
        for span in self.spans:
            if span.speaker == "policy":
                turn += previous != "policy"
                parts.append(np.full(span.end - span.start, turn))
            previous = span.speaker
        turns: np.ndarray = np.concatenate(parts)
        return turns

    @property
    def versions(self) -> list[int | None]:
        """The policy version of each policy span, in their order."""
        return [span.version for span in self._drawn_spans]

    def drawn_by(self, version: int) -> int:
        """Number of tokens that this policy version generated."""
        return sum(span.end - span.start for span in self._drawn_spans if span.version == version)

    @property
    def _drawn_spans(self) -> list[Span]:
        return [span for span in self.spans if span.speaker == "policy"]


def _images_in(spans: Sequence[Span]) -> int:
    return sum(span.image_count for span in spans)


def _routes_of(branches: Sequence[Trajectory]) -> Routes | None:
    """Routes of the joined branches, for all tokens; None if no branch has any."""
    import numpy as np

    known = next((branch.routes for branch in branches if branch.routes is not None), None)
    if known is None:
        return None
    empty = unknown(0, known)
    parts = [padded(empty if branch.routes is None else branch.routes, len(branch.tokens)) for branch in branches]
    routes: np.ndarray = np.concatenate(parts)
    return routes
