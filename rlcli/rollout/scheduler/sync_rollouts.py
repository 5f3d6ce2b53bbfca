"""Synchronous rollouts: generation in rounds, after which the engines are idle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rlcli.data.messages import RolloutBatch
from rlcli.rollout.scheduler.dispatcher import collect, gather
from rlcli.rollout.scheduler.groups import UNKNOWN, Group
from rlcli.rollout.scheduler.rollouts import Rollouts


class SyncRollouts(Rollouts):
    """Generates in rounds until a step has its groups; with `async.staleness`, also for later steps between updates.

    Dynamic sampling (DAPO, arXiv 2503.14476): groups that break the rule `dynamic_sampling.keep` are replaced by new
    ones, in at most `max_batches` rounds. Each round generates `oversample` times the missing groups (exactly the
    missing ones if every group is kept). Surplus groups wait for the next step with their tokens, but for no later one,
    whose policy would be too far from theirs.

    The long tail: with `rollout.oversample` a round starts that many times the groups that it needs, ends once enough
    of them are complete, and aborts the others. These are resumed in the next round or step, before new prompts are
    drawn: finished responses are kept, the others resume from their tokens so far, each token with the log-prob of the
    policy that generated it. So a slow group is delayed but never wasted; no group is dropped for its length.
    """

    def take(self, step: int) -> RolloutBatch:
        self._start_phase(step, self._max_age)
        while len(self.buffer.complete) < self._batch_size and self._has_rounds_left:
            self._round(step, self._batch_size)
        return self._take_batch(step, self.buffer.complete[: self._batch_size])

    def prefetch(self, step: int, should_stop: Callable[[], bool]) -> None:
        """Generate all groups for the next steps. `should_stop` is not read: the next weight update waits for them."""
        capacity = self._batch_size * self._steps_ahead(step)
        self._start_phase(step + 1, self._max_age)
        while len(self.buffer.complete) < capacity and self._has_rounds_left:
            self._round(step + 1, capacity)

    @property
    def _max_age(self) -> int:
        return max(1, self.config.async_.staleness - 1)

    @property
    def _has_rounds_left(self) -> bool:
        return self.totals.stats.rounds < self.config.dynamic_sampling.max_batches

    def _round(self, step: int, capacity: int) -> None:
        """Generate enough groups for `capacity` complete ones, if dynamic sampling keeps the expected share."""
        rollout, rules, stats = self.config.rollout, self.config.dynamic_sampling, self.totals.stats
        missing = capacity - len(self.buffer.complete)
        needed = _scaled(missing, 1.0 if rules.keep == "all" else rules.oversample)
        aborted = len(self.buffer.queued)
        started = max(_scaled(needed, rollout.oversample), aborted)
        self._queue_groups(started - aborted, step)
        groups = self.buffer.queued
        for number, group in enumerate(groups):
            self.buffer.start(group, number)
        path = file_of_round(self.save_as(step), stats.rounds + 1)
        reports = gather(
            self.workers,
            [self._generation_task(group) for group in groups],
            replace(self._arguments(step), save_as=path, first_group=stats.groups),
            tensor_parallel=rollout.tensor_parallel,
            slots=rollout.max_concurrent,
            until=needed if started > needed else None,
            on_progress=lambda done, total: self.on_progress(stats.responses + done, stats.responses + total),
        )
        aborted_earlier = [(group, group.aborted) for group in groups if group.step < step]
        self._add_report(collect(self.workers, reports), len(groups))
        self._check_failures()
        self.buffer.requeue()
        resumed = sum(len(aborted - group.aborted) for group, aborted in aborted_earlier)
        self.totals.stats = replace(self.totals.stats, resumed=self.totals.stats.resumed + resumed)

    def _snapshot(self) -> list[Group]:
        """Copy the groups without their numbers: each round numbers its groups."""
        return [replace(group, number=UNKNOWN) for group in self.buffer.groups]

    def _stop_engines(self) -> None:
        """The engines are idle between rounds."""


def _scaled(count: int, factor: float) -> int:
    """`count` × `factor`, rounded up: 3 × 1.1 is 3.3000000000000003, but 10 × 1.1 is 11 prompts, not 12."""
    return math.ceil(round(count * factor, 6))


def file_of_round(path: str, number: int) -> str:
    """`…/rank-{rank}.parquet`, and from the second round on `…/rank-{rank}.round-2.parquet`."""
    return path if number == 1 or not path else str(Path(path).with_suffix(f".round-{number}.parquet"))
