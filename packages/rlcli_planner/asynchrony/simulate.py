"""Simulate the steps of a run: engines that generate responses of given lengths, and a trainer that takes batches.

Prompts are begun and taken as `StreamingRollouts` does: `accepted + running ≤ (S + step) · batch`,
in the order drawn. What is not simulated: verification, environments, evaluations, checkpoints.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SLICE_S = 0.25
"""As in `rlcli.rollout.scheduler.streaming_rollouts`."""


@dataclass(frozen=True)
class Speeds:
    """decode: responses that an engine generates at once, and tokens that each of them has on average, its prompt
    included → seconds of one token of each. prefill: seconds of a token of a prompt. update: seconds of training on a
    batch with as many tokens as batches have on average. sync: seconds until the engines have the new weights."""

    decode: Callable[[int, float], float]
    prefill: float
    update: float
    sync: float


@dataclass(frozen=True)
class Layout:
    """engines: how many, with `slots` responses at once each. apart: on devices of their own, else on the trainer's.
    staleness: as `async.staleness`. recompute: as `async.on_update`. slice_s: with staleness, seconds after which the
    trainer looks at what the engines have finished, and may update them; 0: at any time."""

    engines: int
    slots: int
    apart: bool = False
    staleness: int = 0
    recompute: bool = True
    slice_s: float = SLICE_S


@dataclass(frozen=True)
class Simulated:
    """step_s: mean seconds of a step once the pipeline is full. trainer_idle, engine_idle: shares of that time. age:
    mean staleness of the prompts, in updates."""

    step_s: float
    trainer_idle: float
    engine_idle: float
    age: float


@dataclass
class _Engine:
    """prompt: tokens of each. tokens: of each response that has run since the start. ends: (tokens at its end, at its
    begin, group); begins: the sum of the second. at: seconds until when the engine is simulated. waiting: (group,
    length) without a slot. load: responses that it has, these included."""

    decode: Callable[[int, float], float]
    slots: int
    prompt: float
    tokens: float = 0.0
    at: float = 0.0
    busy: float = 0.0
    ends: list[tuple[float, float, int]] = field(default_factory=list)
    begins: float = 0.0
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    load: int = 0

    def fill(self, shared: deque[tuple[int, int]]) -> None:
        """Begin responses in the free slots: its own, then those of all engines."""
        while len(self.ends) < self.slots and (queue := self.waiting or shared):
            self.load += queue is shared
            group, length = queue.popleft()
            heapq.heappush(self.ends, (self.tokens + length, self.tokens, group))
            self.begins += self.tokens

    def context(self, more: float = 0.0) -> float:
        """Tokens that each running response has on average, once `more` are drawn."""
        return self.prompt + self.tokens + more - self.begins / len(self.ends)

    def next_end(self) -> float:
        """When the next response is complete, in seconds."""
        if not self.ends:
            return np.inf
        left = self.ends[0][0] - self.tokens
        return self.at + left * self.decode(len(self.ends), self.context(left / 2))

    def run(self, until: float) -> None:
        """Generate; no response is complete before then. The seconds of a token grow with its place; k tokens take
        k (first + slope k / 2)."""
        if self.ends and until > self.at:
            seconds, running = until - self.at, len(self.ends)
            first = self.decode(running, self.context())
            guess = seconds / first
            slope = (self.decode(running, self.context(guess)) - first) / guess
            drawn = 2 * seconds / (first + math.sqrt(first**2 + 2 * slope * seconds))
            self.tokens = min(self.tokens + drawn, self.ends[0][0])
            self.busy += seconds
        self.at = max(self.at, until)

    def complete(self, at: float) -> int:
        """The group of the response that is complete then."""
        self.busy += at - self.at
        self.at = at
        self.tokens, begun, group = heapq.heappop(self.ends)
        self.begins -= begun
        self.load -= 1
        return group

    def paused(self, until: float, recomputed: float) -> None:
        """Nothing is generated until then, nor while what is running is computed again. recomputed: seconds a token."""
        again = len(self.ends) * self.context() * recomputed if self.ends else 0.0
        self.at = max(self.at, until) + again


class _Run:
    def __init__(self, lengths: NDArray[np.int64], speeds: Speeds, layout: Layout, prompt: float) -> None:
        self.steps, self.batch, self.samples = lengths.shape
        self.lengths = lengths.reshape(-1, self.samples)
        self.speeds, self.layout, self.prompt = speeds, layout, prompt
        trained = (prompt + lengths).sum(axis=(1, 2))
        self.shares: list[float] = (trained / trained.mean()).tolist()
        self.engines = [_Engine(speeds.decode, layout.slots, prompt) for _ in range(layout.engines)]
        self.shared: deque[tuple[int, int]] = deque()
        self.missing = [self.samples] * len(self.lengths)
        self.begun_by: list[int] = []
        self.now, self.version, self.trainer_idle = 0.0, 0, 0.0

    def admit(self, step: int) -> None:
        """Begin what may be begun when `step` steps have been taken."""
        until = min((self.layout.staleness + step) * self.batch, len(self.lengths))
        for group in range(len(self.begun_by), until):
            self.begun_by.append(self.version)
            engine = min(self.engines, key=lambda one: one.load)
            engine.at = max(engine.at, self.now) + self.prompt * self.speeds.prefill
            responses = [(group, int(length)) for length in self.lengths[group]]
            if self.layout.staleness or engine.load < self.layout.slots:
                engine.waiting.extend(responses)
                engine.load += self.samples
            else:  # for the first that has room, as in `rlcli.rollout.worker.work_queue`
                self.shared.extend(responses)
        for engine in self.engines:
            engine.fill(self.shared)

    def generate(self, until: float = np.inf, step: int | None = None) -> None:
        """Until then, or until the batch of step `step` is complete; in whole slices."""
        start, until = self.now, self.sliced(self.now, until)
        groups = range(0) if step is None else range(step * self.batch, (step + 1) * self.batch)
        left = sum(self.missing[group] for group in groups)
        ends = [(engine.next_end(), place) for place, engine in enumerate(self.engines)]
        heapq.heapify(ends)
        while ends[0][0] <= until:
            at, place = heapq.heappop(ends)
            engine = self.engines[place]
            group = engine.complete(at)
            self.missing[group] -= 1
            left -= group in groups
            engine.fill(self.shared)
            heapq.heappush(ends, (engine.next_end(), place))
            if groups and not left:
                until, groups = self.sliced(start, at), range(0)
        self.now = until
        for engine in self.engines:
            engine.run(until)

    def sliced(self, start: float, until: float) -> float:
        """The end of the slice in which `until` lies."""
        slice_s = self.layout.slice_s if self.layout.staleness else 0.0
        return start + math.ceil((until - start) / slice_s) * slice_s if slice_s and until < math.inf else until

    def take(self, step: int) -> float:
        """Simulate a step; returns when it ends."""
        self.admit(step + 1)
        before = self.now
        if any(self.missing[group] for group in range(step * self.batch, (step + 1) * self.batch)):
            self.generate(step=step)
        self.trainer_idle += self.now - before
        trained = self.now + self.speeds.update * self.shares[step]
        if self.layout.apart and self.layout.staleness:
            self.generate(until=trained)
            self.trainer_idle += self.now - trained
            trained = self.now
        self.version += 1
        self.now = trained + self.speeds.sync
        again = self.speeds.prefill if self.layout.recompute else 0.0
        for engine in self.engines:
            engine.paused(self.now, again)
        return self.now


def simulate(
    lengths: NDArray[np.int64], speeds: Speeds, layout: Layout, prompt_tokens: float = 0.0, warm_up: int = 1
) -> Simulated:
    """lengths: `[steps, prompts, samples]`, with at least `layout.staleness` + `warm_up` + 1 steps. warm_up: steps that
    do not count, before those in which the pipeline fills. Engines go on as responses end, so a token takes as long as
    the responses at that moment, and the tokens that they have by then, require."""
    run, first = _Run(lengths, speeds, layout, prompt_tokens), layout.staleness + warm_up - 1
    last = len(lengths) - layout.staleness  # later steps have less to generate beside them
    assert last - first >= 2, "too few steps to fill the pipeline"
    ends, idle, busy = list[float](), list[float](), list[float]()
    for step in range(last):
        ends.append(run.take(step))
        idle.append(run.trainer_idle)
        busy.append(sum(engine.busy for engine in run.engines))
    whole = ends[-1] - ends[first]
    ages = [
        step - run.begun_by[step * run.batch + place] for step in range(first + 1, last) for place in range(run.batch)
    ]
    return Simulated(
        step_s=whole / (last - 1 - first),
        trainer_idle=(idle[-1] - idle[first]) / whole,
        engine_idle=1 - (busy[-1] - busy[first]) / (whole * layout.engines),
        age=float(np.mean(ages)),
    )
