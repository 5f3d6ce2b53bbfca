"""Counters of generation. Each is declared once: what it counts, how it adds up, and the metric that shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, get_type_hints


@dataclass(frozen=True)
class Counter:
    """Rules for a field of `RolloutStats`: how it adds up, and where it is shown."""

    metric: str = ""
    """Name of the metric with its value; empty: none."""
    rounds: Literal["sum", "last"] = "sum"
    """Its value for several rounds: their sum, or that of the last one."""
    workers: Literal["sum", "max", "slowest"] = "sum"
    """Its value for a round: over all workers, or that of the worker that took longest."""
    if_zero: bool = True
    """True if the metric is written where the value is 0."""
    saved_as: str = ""
    """Its key in checkpoints, if that is not the field's name."""
    is_saved: bool = True
    """True if checkpoints hold it; not those that are set only when a step takes its groups."""


Number = TypeVar("Number", int, float)


def _over_workers(counter: Counter, values: Sequence[Number], slowest: Number) -> Number:
    """A counter's value for a round. values: of each worker; slowest: of the one that took longest."""
    if counter.workers == "slowest":
        return slowest
    return sum(values) if counter.workers == "sum" else max(values)


@dataclass(frozen=True, slots=True)  # pickled without the names: every rank sends one
class RolloutStats:
    """Counters of generation: of one worker's report, of a round on all workers, of all rounds for one step.

    To add a counter, declare it here, give it its value where it is counted (a worker's report, for example), and
    describe its metric in rlcli/runs/metric_names.py.

    Two workers generate a round; a second round follows with newer weights:

    >>> fast = RolloutStats(generated_tokens=30, generate_s=1.0)
    >>> first = RolloutStats.of_round([fast, RolloutStats(generated_tokens=50, generate_s=3.0)])
    >>> first.rounds, first.generated_tokens, first.generate_s, first.idle_s
    (1, 80, 3.0, 1.0)
    >>> both = first + RolloutStats(rounds=1, generated_tokens=20, generate_s=0.5, version=2)
    >>> both.rounds, both.generated_tokens, both.generate_s, both.version
    (2, 100, 3.5, 2)
    >>> both.metrics()["rollout/rounds"], both.metrics()["throughput/rollout_tokens_per_s"]
    (2.0, 28.571428571428573)
    """

    rounds: Annotated[int, Counter("rollout/rounds", saved_as="count")] = 0
    """Rounds of generation; slices where generation is streaming."""
    groups: Annotated[int, Counter()] = 0
    """Groups that were sent to engines, resumed ones included."""
    generated: Annotated[int, Counter("rollout/generated")] = 0
    """Verified samples, those of dropped and waiting groups included."""
    counting: Annotated[int, Counter()] = 0
    """Tokens of them that count: their verification did not fail, and `train.truncated` does not mask them."""
    score: Annotated[float, Counter()] = 0.0
    """Sum of the scores of the samples that count."""
    responses: Annotated[int, Counter(saved_as="asked")] = 0
    """Verified responses: samples and greedy baselines."""
    generated_tokens: Annotated[int, Counter(saved_as="tokens")] = 0
    """Tokens that the engines generated."""
    dropped: Annotated[int, Counter("rollout/dropped_groups")] = 0
    """Complete groups that dynamic sampling rejected."""
    too_old: Annotated[int, Counter("rollout/too_old_groups")] = 0
    """Complete groups that were dropped for their age."""
    aborted: Annotated[int, Counter("rollout/aborted", rounds="last")] = 0
    """Responses that the last round left unfinished."""
    resumed: Annotated[int, Counter("rollout/resumed", saved_as="carried")] = 0
    """Samples that an earlier step had aborted and that were finished."""
    replay_diverged: Annotated[int, Counter("rollout/replay_diverged", saved_as="redrawn")] = 0
    """Resumed conversations that were generated again: their environment answered the replay differently."""
    drafted: Annotated[int, Counter("rollout/drafted", if_zero=False)] = 0
    """Tokens that speculative decoding drafted."""
    accepted: Annotated[int, Counter()] = 0
    """Drafted tokens that the policy accepted."""
    version: Annotated[int, Counter(rounds="last", workers="max")] = 0
    """Policy version of the engines: number of weight syncs."""
    generate_s: Annotated[float, Counter(workers="slowest")] = 0.0
    """Seconds until the last response was finished."""
    verify_s: Annotated[float, Counter("time/verify_wait_s", workers="slowest")] = 0.0
    """Seconds of waiting for verdicts after that."""
    idle_s: Annotated[float, Counter("time/idle_s")] = 0.0
    """Seconds for which a worker, on average, waited for the slowest."""
    carried_over: Annotated[int, Counter("rollout/carried_over_groups", is_saved=False)] = 0
    """Complete groups that wait for a later step when this one has taken its own."""
    in_flight: Annotated[int, Counter("rollout/in_flight_groups", is_saved=False)] = 0
    """Groups that the engines continue to generate for later steps."""
    stale: Annotated[int, Counter("rollout/stale", is_saved=False)] = 0
    """Samples of the step with tokens of an older policy version than the engines have."""

    @classmethod
    def of_round(cls, workers: Sequence[RolloutStats]) -> RolloutStats:
        """One round that all workers generated at the same time."""
        slowest = max(workers, key=lambda stats: stats.seconds)
        values = {
            name: _over_workers(counter, [getattr(stats, name) for stats in workers], getattr(slowest, name))
            for name, counter in COUNTERS.items()
        }
        values["rounds"] = 1
        values["idle_s"] = slowest.seconds - math.fsum(stats.seconds for stats in workers) / len(workers)
        return replace(slowest, **values)

    def __add__(self, other: RolloutStats) -> RolloutStats:
        """Add counters of later rounds."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        return replace(other, **sums)

    @property
    def seconds(self) -> float:
        """Seconds of generation and of waiting for verdicts."""
        return self.generate_s + self.verify_s

    @property
    def mean_score(self) -> float:
        """Mean score of the samples that count; 0 if there are none."""
        return self.score / max(self.counting, 1)

    def metrics(self) -> dict[str, float]:
        """Metrics of a step: the counters that have one, and what follows from them. `reward/generated` is missing if
        waiting groups filled the step."""
        metrics = {
            counter.metric: float(value)
            for name, counter in COUNTERS.items()
            for value in [getattr(self, name)]
            if counter.metric and (value or counter.if_zero)
        }
        if self.drafted:
            metrics["rollout/drafts_accepted"] = self.accepted / self.drafted
        if self.generated:
            metrics["reward/generated"] = self.mean_score
        if self.generate_s and self.generated_tokens:
            metrics["throughput/rollout_tokens_per_s"] = self.generated_tokens / self.generate_s
        return metrics

    def state(self) -> dict[str, float]:
        """Values for a checkpoint, by key."""
        return {key: getattr(self, name) for name, key in _SAVED.items()}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> RolloutStats:
        """The inverse of `state`. Counters that an older checkpoint lacks are 0."""
        return replace(cls(), **{name: state[key] for name, key in _SAVED.items() if key in state})


COUNTERS: Mapping[str, Counter] = {
    name: next(item for item in hint.__metadata__ if isinstance(item, Counter))
    for name, hint in get_type_hints(RolloutStats, include_extras=True).items()
}
"""Field of `RolloutStats` → how it adds up and is shown."""
_SUMMED = [name for name, counter in COUNTERS.items() if counter.rounds == "sum"]
_SAVED = {name: counter.saved_as or name for name, counter in COUNTERS.items() if counter.is_saved}
