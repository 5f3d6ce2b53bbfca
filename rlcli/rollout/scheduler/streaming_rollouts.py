"""Streaming rollouts: the engines generate across weight updates, in slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from rlcli.data.messages import PartialRollout, PromptTask, RolloutBatch
from rlcli.rollout.rollout_arguments import Slice
from rlcli.rollout.scheduler.dispatcher import collect, run_shares
from rlcli.rollout.scheduler.groups import NO_SAMPLES, UNKNOWN, Group
from rlcli.rollout.scheduler.rollouts import Rollouts
from rlcli.rollout.scheduler.sync_rollouts import file_of_round
from rlcli.rollout.worker_calls import RolloutCalls

SLICE_STEPS = 16
"""Engine steps of a slice, if steps are counted (`RunConfig.counts_steps`)."""
SLICE_S = 0.25
"""Seconds of a slice, if they are not: also the longest wait of a weight update for the engines."""


class StreamingRollouts(Rollouts):
    """Keeps up to (1 + `async.staleness`) batches of groups running or complete; a step takes the oldest batch.

    A slice ends after some steps or seconds: the engines return what they have finished and keep the rest, which the
    next slice resumes. A weight update does not wait for running groups: each token has the version that generated it.

    Bounded staleness: in all, groups taken + running + complete ≤ (`async.staleness` + step) · P, where P is
    `rollout.prompts_per_step`. No group is drawn that no step would train on.

    Dynamic sampling (DAPO, arXiv 2503.14476) replaces a rejected group in the next slice, until `max_batches` batches
    of groups were drawn for the step.
    """

    def take(self, step: int) -> RolloutBatch:
        capacity = self._batch_size * (1 + self._steps_ahead(step))
        self._start_phase(step, self._max_age)
        while not self._is_ready and self._has_work(capacity):
            self._generate(step, capacity, self._slice)
        batch = self._take_batch(step, [group for group in self._oldest if group.is_complete])
        incomplete = len(self.buffer.queued) + len(self.buffer.running)
        return replace(batch, stats=replace(batch.stats, in_flight=incomplete))

    def prefetch(self, step: int, should_stop: Callable[[], bool]) -> None:
        """Generate for `async.engine_steps` steps of the engines, or until the engines are needed."""
        capacity = self._batch_size * self._steps_ahead(step)
        self._start_phase(step + 1, self._max_age)
        for slice in self._slices(should_stop):
            if not self._has_work(capacity):
                return
            self._generate(step + 1, capacity, slice)

    @property
    def _max_age(self) -> int:
        return max(1, self.config.async_.staleness)

    @property
    def _oldest(self) -> list[Group]:
        """The groups that the next step trains on, if they are complete."""
        return self.buffer.groups[: self._batch_size]

    @property
    def _is_ready(self) -> bool:
        return len(self._oldest) == self._batch_size and all(group.is_complete for group in self._oldest)

    def _has_work(self, capacity: int) -> bool:
        """True if new groups may be drawn, or some are incomplete."""
        groups = self.buffer.groups
        return (len(groups) < capacity and not self._is_exhausted) or len(self.buffer.complete) < len(groups)

    @property
    def _is_exhausted(self) -> bool:
        """True if no more groups may be drawn for this step."""
        rules = self.config.dynamic_sampling
        return rules.keep != "all" and self.totals.stats.groups >= rules.max_batches * self._batch_size

    @property
    def _slice(self) -> Slice:
        """A slice for a step that the run waits for."""
        return Slice(steps=SLICE_STEPS) if self.config.counts_steps else Slice(seconds=SLICE_S)

    def _slices(self, should_stop: Callable[[], bool]) -> Iterator[Slice]:
        """The slices while a step is trained on."""
        steps = self.config.engine_steps
        if steps is None:
            while not should_stop():
                yield Slice(seconds=SLICE_S)
        else:
            for start in range(0, steps, SLICE_STEPS):
                yield Slice(steps=min(SLICE_STEPS, steps - start))

    def _generate(self, step: int, capacity: int, slice: Slice) -> None:
        """Draw new groups up to `capacity`, and generate one slice."""
        batch = self._batch_size * self.config.rollout.samples_per_prompt
        self._queue_groups(0 if self._is_exhausted else max(0, capacity - len(self.buffer.groups)), step)
        groups = self.buffer.queued
        shares = self._started(groups)
        done = self.totals.stats.responses

        def finished(count: int) -> None:
            nonlocal done
            done += count
            self.on_progress(min(done, batch), batch)

        path = file_of_round(self.save_as(step), self.totals.phase)
        arguments = replace(self._arguments(step), save_as=path, slice=slice)
        tensor_parallel = self.config.rollout.tensor_parallel
        reports = run_shares(self.workers, shares, arguments, finished, tensor_parallel=tensor_parallel)
        self._add_slice_report(collect(self.workers, reports), len(groups))

    def _add_slice_report(self, report: RolloutBatch, sent: int) -> None:
        """Add a slice's report. Failure rates are checked once a batch of responses is verified."""
        self._add_report(report, sent)
        if self.totals.stats.responses >= self._batch_size * self.config.rollout.samples_per_prompt:
            self._check_failures()

    def _started(self, groups: list[Group]) -> list[list[PromptTask]]:
        """Start queued groups; returns the tasks of each engine. A new group gets a number and the engine with the
        fewest missing samples; a group from a checkpoint keeps its number and engine. Each engine gets its groups
        oldest first, as in a run that was not interrupted."""
        loads = [0] * self._engine_count
        for group in self.buffer.queued + self.buffer.running:
            if group.engine in range(self._engine_count):
                loads[group.engine] += self.buffer.missing(group)
        shares: list[list[PromptTask]] = [[] for _ in loads]
        for group in groups:
            if group.engine not in range(self._engine_count):
                group.engine = loads.index(min(loads))
                loads[group.engine] += self.buffer.missing(group)
            number = group.number
            if number == UNKNOWN:
                number, self._next_number = self._next_number, self._next_number + 1
            self.buffer.start(group, number)
            shares[group.engine].append(self._generation_task(group))
        return shares

    def _snapshot(self) -> list[Group]:
        """Copy the groups, running ones with their partial responses. In-flight requests are not interrupted, so that a
        resumed run stays bit-identical."""
        if not self.buffer.running:
            return self.buffer.groups
        report = collect(self.workers, self.workers.call(RolloutCalls.rollout_snapshot, False))
        partial: dict[int, list[PartialRollout]] = {}
        for rollout in report.partial:
            partial.setdefault(rollout.prompt, []).append(rollout)
        # As in a run without this checkpoint: no round is counted, and no response was aborted.
        stats = replace(report.stats, rounds=0, version=self.totals.stats.version, aborted=0)
        self._add_slice_report(replace(report, partial=(), stats=stats), 0)
        groups = [replace(group) for group in self.buffer.groups]
        for group in groups:
            if not group.is_complete and group.number in partial:
                group.add(NO_SAMPLES, partial[group.number], report.shards, None)
        return groups

    def _stop_engines(self) -> None:
        if self.buffer.running:
            self.workers.call(RolloutCalls.rollout_snapshot, True)
            self.buffer.requeue()
