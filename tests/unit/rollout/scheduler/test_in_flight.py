"""Generation that goes on through weight updates: how old samples may be, in which order they are taken, and what
becomes of responses when the weights change, a checkpoint is taken or a run resumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.data.messages import RolloutBatch
from rlcli.errors import CheckpointError
from rlcli.rollout.engine import Generation, GenerationRequest, Sampling
from rlcli.rollout.scheduler import streaming_rollouts
from rlcli.rollout.scheduler.prefetch import Prefetcher
from rlcli.rollout.scheduler.rollouts import Rollouts
from rlcli.rollout.scheduler.streaming_rollouts import StreamingRollouts
from tests.unit.rollout.worker import test_work_queue as harness
from tests.unit.rollout.worker.test_work_queue import END, LIMIT, SAMPLES, whole_response

STEPS, BATCH = 8, 4


class Engine(harness.Engine):
    """Tells for each token by its log-prob which weights drew it, also of a response that stays in it."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.drawn_by: dict[int, list[float]] = {}
        self.resets = 0

    def begin(self, sampling: Sampling) -> None:
        super().begin(sampling)
        self.resets += 1

    def add(self, request: GenerationRequest) -> None:
        super().add(request)
        self.drawn_by[request.key] = []

    def step(self) -> list[Generation]:
        for key in list(self.under_way)[: self.slots]:
            self.drawn_by[key].append(-float(self.version))
        return super().step()

    def peek(self) -> list[Generation]:
        pending = dict(self.under_way)
        generations = [self._of(key, None) for key in pending]
        self.under_way = pending
        return generations

    def _of(self, key: int, reason: Any) -> Generation:
        generation = super()._of(key, reason)
        return Generation(key, generation.tokens, np.array(self.drawn_by[key], np.float32), reason)


class Workers(harness.Workers):
    """keep: on an update. interrupted: whether each call to do so ended a generation under way."""

    def __init__(self, engines: Sequence[Engine], keep: bool = False) -> None:
        super().__init__(list(engines), same_bits=True)
        self.keep = keep
        self.interrupted: list[bool] = []

    def load(self, version: int) -> None:
        for role in self.roles:
            role.pause(keep=self.keep)
        super().load(version)

    def rollout_snapshot(self, end: bool) -> list[RolloutBatch]:
        self.interrupted.append(end)
        return [role.snapshot(end=end, keep=self.keep) for role in self.roles]


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_rollouts, "SLICE_STEPS", 3)
    monkeypatch.setattr(streaming_rollouts, "SLICE_S", 0.0)


def source_of(
    workers: Workers, staleness: int, engine_steps: int | None, separate: bool = True, **rules: Any
) -> Rollouts:
    source = harness.source_of(workers, oversample=1.0, kind=StreamingRollouts, **rules)
    async_config = {"staleness": staleness, "engine_steps": engine_steps}
    source.config = source.config.changed(
        async_=async_config, rollout={"workers": len(workers) if separate else 0}, train={"steps": STEPS}
    )
    return source


@dataclass
class Run:
    """Trains nothing. batches: what each step was given. waiting: the most groups at any update."""

    source: Rollouts
    workers: Workers
    batches: list[RolloutBatch] = field(default_factory=list)
    waiting: int = 0

    def until(self, last: int, *, first: int = 1, resumed: bool = False) -> Run:
        """The steps from `first` to `last`. resumed: after each, continue from its checkpoint with other workers."""
        for step in range(first, last + 1):
            self.workers.load(step)
            self.batches.append(self.source.take(step))
            if self.source.config.rollout.workers and step < STEPS:
                self.source.prefetch(step, lambda: False)
            self.waiting = max(self.waiting, len(self.source.buffer.groups))
            if resumed:
                self.resume(step)
        return self

    def resume(self, step: int) -> None:
        self.workers.load(step + 1)
        plain, shards = self.source.state()
        config, cursor = self.source.config, self.source.cursor.state()
        self.workers = Workers([Engine(engine.slots) for engine in self.workers.engines], self.workers.keep)
        other = harness.source_of(self.workers, oversample=1.0, kind=StreamingRollouts)
        other.config, other.cursor = config, other.cursor.restored(cursor)
        other.restore(json.loads(json.dumps(plain)), shards)
        self.source = other

    def rows(self) -> list[list[tuple[Any, ...]]]:
        """Of each step: tokens, versions and log-probs of each sample."""
        table = []
        for batch in self.batches:
            wholes = [(s, batch.shards[s.shard].row(s.row)) for s in batch.samples]
            stats = batch.stats
            figures = [("figures", stats.in_flight, stats.carried_over, stats.rounds, stats.generated, stats.resumed)]
            figures += [("figures", stats.aborted, stats.stale, stats.dropped, stats.mean_score)]
            rows = [(s.prompt, s.sample, w.tokens.tolist(), w.log_probs.tolist(), w.spans) for s, w in wholes]
            table.append([*figures, *rows])
        return table


def check(batch: RolloutBatch, step: int, staleness: int) -> list[int]:
    """Checks that no token is older than `staleness`, that each has the version that sampled it, and that each response
    continues the one that was started. Returns the dataset's rows."""
    assert len(batch.samples) == BATCH * SAMPLES
    rows: dict[int, int] = {}
    for s in batch.samples:
        trajectory = batch.shards[s.shard].row(s.row)
        row = rows.setdefault(s.prompt, int(trajectory.tokens[0]))
        response = trajectory.response_ids.tolist()
        assert response in [whole_response(row, s.sample, began) for began in range(1, step + 1)]
        drawn_by = [version for span in trajectory.spans[1:] for version in [span.version] * (span.end - span.start)]
        assert drawn_by == (-trajectory.log_probs).tolist() == sorted(drawn_by)
        assert trajectory.versions == sorted(set(drawn_by))
        assert (s.version, s.version + s.newer_by) == (drawn_by[0], drawn_by[-1])
        by_version = tuple(drawn_by.count(version) for version in range(drawn_by[0], drawn_by[-1] + 1))
        assert s.version_tokens == (by_version if s.newer_by else ())
        assert step - staleness <= drawn_by[0] <= drawn_by[-1] <= step
        assert len(response) == s.response_tokens == s.verdict.score
        assert response[-1] == END or len(response) == LIMIT
    return [rows[prompt] for prompt in range(BATCH)]


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(
    staleness=st.integers(1, 4),
    slots=st.sampled_from([2, 6, 32]),
    engines=st.integers(1, 3),
    steps=st.sampled_from([None, 0, 5, 40]),
    separate=st.booleans(),
    keep=st.booleans(),
)
def test_groups_are_taken_in_the_order_drawn_and_none_is_too_old(
    staleness: int, slots: int, engines: int, steps: int | None, separate: bool, keep: bool
) -> None:
    workers = Workers([Engine(slots) for _ in range(engines)], keep and separate)
    run = Run(source_of(workers, staleness, steps, separate), workers)
    if steps is None and separate:  # the update comes after two looks
        looks = iter([False, False, True] * STEPS)
        prefetch = run.source.prefetch
        run.source.prefetch = lambda step, should_stop: prefetch(step, lambda: next(looks))  # type: ignore[method-assign]
    run.until(STEPS)
    rows = [row for step, batch in enumerate(run.batches, 1) for row in check(batch, step, staleness)]
    assert rows == list(range(BATCH * STEPS))
    assert run.waiting <= staleness * BATCH
    assert run.source.buffer.groups == [], "nothing is begun that no step trains on"
    assert run.source.cursor.position == BATCH * STEPS
    assert all(engine.unfinished == 0 for engine in workers.engines)


def test_responses_go_on_through_updates_and_the_first_ones_do_not_wait() -> None:
    workers = Workers([Engine(32)])
    run = Run(source_of(workers, 2, 5), workers).until(STEPS)
    versions = [batch.samples.newer_by for batch in run.batches]
    assert any(newer.any() for newer in versions)
    assert any(batch.stats.stale for batch in run.batches)
    assert run.batches[0].stats.stale == 0
    generated = sum(batch.stats.generated_tokens for batch in run.batches)
    assert generated == sum(int(batch.samples.response_tokens.sum()) for batch in run.batches), (
        "no token is drawn twice"
    )


@pytest.mark.parametrize(
    ("staleness", "steps", "separate"), [(1, 0, True), (2, 0, True), (2, 5, True), (2, None, False)]
)
def test_a_run_that_counts_steps_is_a_function_of_its_seed_and_resumes(
    staleness: int, steps: int | None, separate: bool
) -> None:
    def run(resumed: bool) -> list[list[tuple[Any, ...]]]:
        workers = Workers([Engine(6), Engine(6)])
        source = source_of(workers, staleness, steps, separate)
        source.config = source.config.changed(train={"deterministic": True, "steps": STEPS})
        run = Run(source, workers)
        return run.until(STEPS, resumed=resumed).rows()

    assert run(False) == run(False) == run(True)


def test_a_checkpoint_has_what_is_under_way_and_interrupts_nothing() -> None:
    for steps in (None, 5):
        workers = Workers([Engine(6)])
        source = source_of(workers, 2, steps)
        run = Run(source, workers)
        workers.load(1)
        run.batches.append(source.take(1))
        looks = iter([False, True])
        source.prefetch(1, looks.__next__)
        workers.load(2)
        plain, _ = source.state()
        assert workers.interrupted == [False]
        partials = [partial for group in plain["waiting"] if group["open"] for partial in group["open"]["partial"]]
        assert partials
        run.until(STEPS, first=2)
        rows = [row for step, batch in enumerate(run.batches, 1) for row in check(batch, step, 2)]
        assert rows == list(range(BATCH * STEPS))


def test_what_is_kept_stays_in_the_engine_and_is_not_computed_again() -> None:
    reusing, computed = (Workers([Engine(6)], keep) for keep in (True, False))
    for workers in (reusing, computed):
        Run(source_of(workers, 2, 5), workers).until(STEPS)
    request_counts = [sum(len(engine.requests) for engine in workers.engines) for workers in (reusing, computed)]
    assert request_counts[0] == BATCH * STEPS * SAMPLES < request_counts[1]


def test_dropped_groups_are_replaced_at_once_and_bounds_hold() -> None:
    workers = Workers([Engine(6), Engine(6)])
    rules = {"keep": "accuracy", "low": 4.0, "high": 100.0, "max_batches": 20}
    run = Run(source_of(workers, 2, 5, **rules), workers).until(5)
    for step, batch in enumerate(run.batches, 1):
        rows = check(batch, step, 2)
        assert rows == sorted(rows)
        assert (batch.samples.score.reshape(BATCH, SAMPLES).mean(1) >= 4.0).all()
    assert sum(batch.stats.dropped for batch in run.batches) > 0
    assert run.waiting <= 2 * BATCH


def test_groups_older_than_a_lowered_bound_are_dropped_or_kept_by_rule() -> None:
    for rule, included in (("drop", False), ("keep", True)):
        workers = Workers([Engine(32)])
        run = Run(source_of(workers, 4, 40), workers).until(2)
        run.resume(2)
        old = [group for group in run.source.buffer.groups if group.is_complete and group.step < 3]
        assert old
        run.source.config = run.source.config.changed(async_={"staleness": 1, "too_old": rule})
        run.workers.load(4)
        run.workers.load(5)
        batch = run.source.take(5)
        assert (batch.stats.too_old > 0) != included
        assert (5 - int(batch.samples.version.min()) > 1) == included


def test_the_engines_generate_until_they_are_needed() -> None:
    workers = Workers([Engine(6)])
    source = source_of(workers, 2, None)
    prefetcher = Prefetcher(source, True, STEPS, lambda: None)
    rows: list[int] = []
    for step in range(1, STEPS + 1):
        workers.load(step)
        rows += check(prefetcher.take(step), step, 2)
        prefetcher.wait()
        assert prefetcher.waited_for
    assert rows == list(range(BATCH * STEPS))


def test_what_is_dropped_is_forgotten_by_the_engines_too() -> None:
    workers = Workers([Engine(6)])
    source = source_of(workers, 2, 5)
    Run(source, workers).until(2)
    source.discard()
    assert (source.buffer.groups, source.has_started, workers.engines[0].unfinished) == ([], False, 0)
    position = source.cursor.position
    workers.load(3)
    assert check(source.take(3), 3, 0)[0] == position


def test_a_checkpoint_of_an_earlier_form_is_refused() -> None:
    source = source_of(Workers([Engine(6)]), 1, 0)
    with pytest.raises(CheckpointError, match="generated ahead in the form of an earlier version"):
        source.restore({"waiting": [], "ahead": {"step": 3}}, [])
