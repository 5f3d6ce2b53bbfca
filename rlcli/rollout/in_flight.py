"""In-flight responses across weight updates: each token is recorded with the policy version that generated it.

A pause aborts the requests in the engine and keeps their tokens. To resume, they are added again, and the engine
recomputes their KV cache with its current weights. An engine that is `Keeping` can also continue without an abort: the
new weights then generate from the KV cache of the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rlcli.data.expert_routes import continued
from rlcli.data.trajectories import Trajectory
from rlcli.rollout.engine import Generation, GenerationRequest, Generator, Keeping
from rlcli.types import FinishReason

if TYPE_CHECKING:
    from jaxtyping import Float32, Int32, UInt


@dataclass(frozen=True)
class VersionedTokens:
    """Consecutive response tokens of one policy version."""

    tokens: Int32[np.ndarray, " R"]
    """Token ids."""
    log_probs: Float32[np.ndarray, " R"]
    """Log-probs of the tokens, in nats."""
    version: int
    """Policy version (number of weight syncs)."""


@dataclass(frozen=True)
class RequestOutput:
    """Response tokens of one request so far."""

    key: int
    """Key of the request."""
    parts: Sequence[VersionedTokens]
    """Parts in generation order; at least one, which may be empty."""
    finish_reason: FinishReason | None
    """Why it ended; None if it has not."""
    routes: UInt[np.ndarray, "T layers chosen"] | None = None
    """As `Generation.routes`; each token has those of the forward pass that generated it."""

    @property
    def tokens(self) -> Int32[np.ndarray, " R"]:
        """Tokens of all parts."""
        return np.concatenate([part.tokens for part in self.parts])

    @property
    def log_probs(self) -> Float32[np.ndarray, " R"]:
        """Log-probs of all parts."""
        return np.concatenate([part.log_probs for part in self.parts])

    def appended_to(self, trajectory: Trajectory) -> Trajectory:
        """Extend `trajectory` by these tokens: a span for each version.

        >>> ids, log_probs = np.arange(5, dtype=np.int32), np.zeros(5, np.float32)
        >>> parts = [VersionedTokens(ids[1:3], log_probs[1:3], 4), VersionedTokens(ids[3:], log_probs[3:], 5)]
        >>> trajectory = RequestOutput(0, parts, "stop").appended_to(Trajectory.of_prompt(ids[:1]))
        >>> trajectory.tokens.tolist(), trajectory.versions, trajectory.stop_reason
        ([0, 1, 2, 3, 4], [4, 5], 'stop')
        """
        for part in [part for part in self.parts if len(part.tokens)] or self.parts[-1:]:
            trajectory = trajectory.extended("policy", part.tokens, part.log_probs, part.version)
        return replace(trajectory, stop_reason=self.finish_reason).with_routes(self.routes)


class InFlight:
    """Requests of one generation that `engine` has not finished.

    in_flight.add(request)
    outputs = [in_flight.finished(generation, version) for generation in engine.step()]
    in_flight.pause(version)                # the engine is idle: for other weights, or another generation
    engine.begin(sampling)
    outputs += in_flight.resume()
    """

    def __init__(self, engine: Generator) -> None:
        self.tokens = 0
        """Tokens generated so far, of all requests."""
        self._engine = engine
        self._requests: dict[int, GenerationRequest] = {}
        self._parts: dict[int, list[VersionedTokens]] = {}
        self._routes: dict[int, UInt[np.ndarray, "T layers chosen"] | None] = {}
        self._returned_before: dict[int, int] = {}  # tokens of `_parts` that the engine will return again
        self._reasons: dict[int, FinishReason | None] = {}  # of requests that it has finished and not returned
        self._paused: set[int] = set()
        self._ended: list[RequestOutput] = []

    def add(self, request: GenerationRequest) -> None:
        """Add a request to the engine."""
        self._requests[request.key] = request
        self._engine.add(request)

    def finished(self, generation: Generation, version: int) -> RequestOutput:
        """Record a finished response of the engine, whose weights are of `version` since the last pause."""
        self._record(generation, version)
        del self._requests[generation.key]
        self._reasons.pop(generation.key, None)
        parts, routes = self._parts.pop(generation.key), self._routes.pop(generation.key)
        return RequestOutput(generation.key, parts, generation.finish_reason, routes)

    def pause(self, version: int, *, keep: bool = False) -> None:
        """Record the tokens so far, before weights of `version` are replaced. keep: the requests stay in the engine,
        with their KV cache."""
        if keep:
            assert isinstance(self._engine, Keeping), "refused before the run starts"
            for generation in self._engine.peek():
                self._record(generation, version)
                self._returned_before[generation.key] = len(generation.tokens)
                self._reasons[generation.key] = generation.finish_reason
            return
        for generation in self._engine.abort():
            if generation.finish_reason is not None:
                self._ended.append(self.finished(generation, version))
                continue
            self._record(generation, version)
            self._paused.add(generation.key)

    def resume(self) -> list[RequestOutput]:
        """Add paused requests to the engine again, in the order of their keys. Returns those that ended at the
        pause."""
        for key in sorted(self._paused):
            request = self._requests[key]
            parts = [] if request.response_prefix is None else [request.response_prefix]
            parts += [part.tokens for part in self._parts[key]]
            self._engine.add(replace(request, response_prefix=np.concatenate(parts)))
        self._paused.clear()
        ended, self._ended = self._ended, []
        return ended

    def so_far(self) -> Mapping[int, RequestOutput]:
        """Tokens of each request until the last pause, by key."""
        return {
            key: RequestOutput(key, parts, self._reasons.get(key), self._routes[key])
            for key, parts in self._parts.items()
        }

    def _record(self, generation: Generation, version: int) -> None:
        start, parts = self._returned_before.pop(generation.key, 0), self._parts.setdefault(generation.key, [])
        self._routes[generation.key] = continued(self._routes.get(generation.key), generation.routes)
        part = VersionedTokens(generation.tokens[start:], generation.log_probs[start:], version)
        self.tokens += len(part.tokens)
        if len(part.tokens) or not parts:
            parts.append(part)
