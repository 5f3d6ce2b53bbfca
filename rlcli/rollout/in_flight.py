"""Responses that an engine is generating: they go on when its weights change, each token with the version that drew it.

A pause aborts them in the engine and keeps their tokens; after it they are added again, and the engine computes their
keys and values with the weights that it has then. An engine that is `Keeping` can also go on without an abort: what
follows is then drawn by the new weights from keys and values of the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlcli.data.expert_routes import continued
from rlcli.data.trajectories import Trajectory
from rlcli.rollout.engine import Generation, GenerationRequest, Generator, Keeping
from rlcli.types import FinishReason

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class ResponsePart:
    """Consecutive response tokens that weights of one version generated."""

    tokens: np.ndarray
    """int32 `[n]`."""
    log_probs: np.ndarray
    """float32 `[n]`: in nats."""
    version: int
    """Policy version (number of weight syncs)."""


@dataclass(frozen=True)
class PolicyResponse:
    """What the policy has generated of one request."""

    key: int
    """Key of the request."""
    parts: Sequence[ResponsePart]
    """In their order; at least one, which may be empty."""
    finish_reason: FinishReason | None
    """Why it ended; None if it has not."""
    routes: np.ndarray | None = None
    """As `Generation.routes`, each token's from when it was generated."""

    @property
    def tokens(self) -> np.ndarray:
        import numpy as np

        tokens: np.ndarray = np.concatenate([part.tokens for part in self.parts])
        return tokens

    @property
    def log_probs(self) -> np.ndarray:
        import numpy as np

        log_probs: np.ndarray = np.concatenate([part.log_probs for part in self.parts])
        return log_probs

    def after(self, before: Trajectory) -> Trajectory:
        """The trajectory `before` and what was drawn then: a span for each version.

        >>> import numpy as np
        >>> ids, log_probs = np.arange(5, dtype=np.int32), np.zeros(5, np.float32)
        >>> parts = [ResponsePart(ids[1:3], log_probs[1:3], 4), ResponsePart(ids[3:], log_probs[3:], 5)]
        >>> whole = PolicyResponse(0, parts, "stop").after(Trajectory.of_prompt(ids[:1]))
        >>> whole.tokens.tolist(), whole.versions, whole.stop_reason
        ([0, 1, 2, 3, 4], [4, 5], 'stop')
        """
        for part in [part for part in self.parts if len(part.tokens)] or self.parts[-1:]:
            before = before.extended("policy", part.tokens, part.log_probs, part.version)
        return replace(before, stop_reason=self.finish_reason).routed(self.routes)


class InFlight:
    """The requests of one generation that `engine` has not finished. tokens: drawn so far, of all requests.

    in_flight.add(request)
    drawn = [in_flight.finished(generation, version) for generation in engine.step()]
    in_flight.pause(version)                # the engine is free: for other weights, or another generation
    engine.begin(sampling)
    drawn += in_flight.resume()
    """

    def __init__(self, engine: Generator) -> None:
        self.tokens = 0
        self._engine = engine
        self._requests: dict[int, GenerationRequest] = {}
        self._parts: dict[int, list[ResponsePart]] = {}
        self._routes: dict[int, np.ndarray | None] = {}
        self._held: dict[int, int] = {}  # how many tokens of `_parts` the engine returns once more
        self._reasons: dict[int, FinishReason | None] = {}  # of what it has finished and not returned
        self._paused: set[int] = set()
        self._ended: list[PolicyResponse] = []

    def add(self, request: GenerationRequest) -> None:
        self._requests[request.key] = request
        self._engine.add(request)

    def finished(self, generation: Generation, version: int) -> PolicyResponse:
        """Take a response from the engine, whose weights have been of `version` since the last pause."""
        self._took(generation, version)
        del self._requests[generation.key]
        self._reasons.pop(generation.key, None)
        parts, routes = self._parts.pop(generation.key), self._routes.pop(generation.key)
        return PolicyResponse(generation.key, parts, generation.finish_reason, routes)

    def pause(self, version: int, *, keep: bool = False) -> None:
        """Before the weights change, which are of `version`. keep: leave the requests in the engine, with their keys
        and values."""
        if keep:
            assert isinstance(self._engine, Keeping), "refused before the run starts"
            for generation in self._engine.peek():
                self._took(generation, version)
                self._held[generation.key] = len(generation.tokens)
                self._reasons[generation.key] = generation.finish_reason
            return
        for generation in self._engine.abort():
            if generation.finish_reason is not None:
                self._ended.append(self.finished(generation, version))
                continue
            self._took(generation, version)
            self._paused.add(generation.key)

    def resume(self) -> list[PolicyResponse]:
        """Add what was paused to the engine again, in the order of the keys. Returns what ended at the pause."""
        import numpy as np

        for key in sorted(self._paused):
            request = self._requests[key]
            begun = [] if request.begun is None else [request.begun]
            begun += [part.tokens for part in self._parts[key]]
            self._engine.add(replace(request, begun=np.concatenate(begun)))
        self._paused.clear()
        ended, self._ended = self._ended, []
        return ended

    def so_far(self) -> Mapping[int, PolicyResponse]:
        """What was drawn of each request until the last pause, by key."""
        return {
            key: PolicyResponse(key, parts, self._reasons.get(key), self._routes[key])
            for key, parts in self._parts.items()
        }

    def _took(self, generation: Generation, version: int) -> None:
        held, parts = self._held.pop(generation.key, 0), self._parts.setdefault(generation.key, [])
        self._routes[generation.key] = continued(self._routes.get(generation.key), generation.routes)
        part = ResponsePart(generation.tokens[held:], generation.log_probs[held:], version)
        self.tokens += len(part.tokens)
        if len(part.tokens) or not parts:
            parts.append(part)
