"""Where a step's samples come from: refills, what waits, seeds, baselines, and greedy requests in a worker."""

from __future__ import annotations

import gc
import json
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.data.messages import Progress, PromptTask, RolloutBatch, sample_seed
from rlcli.data.prompts.cursor import PromptCursor
from rlcli.data.prompts.dataset_mixture import MixedCursor, Unit, build_cursor
from rlcli.data.prompts.prompt_table import JoinedPrompts
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.data.rollout_stats import RolloutStats
from rlcli.data.trajectories import Trajectory
from rlcli.errors import RunFailed
from rlcli.evaluation.evaluation_report import evaluate
from rlcli.rewards.service.scoring_client import Scored
from rlcli.rollout.engine import Generation, GenerationRequest, Sampling
from rlcli.rollout.rollout_arguments import RolloutArguments
from rlcli.rollout.scheduler.batch_source import samples_path
from rlcli.rollout.scheduler.group_checkpoint import groups_from_json, groups_to_json
from rlcli.rollout.scheduler.group_results import correct_and_scored, scored_groups
from rlcli.rollout.scheduler.groups import Group
from rlcli.rollout.scheduler.prefetch import Prefetcher
from rlcli.rollout.scheduler.sync_rollouts import SyncRollouts
from rlcli.rollout.worker.pending_samples import PLACEHOLDER_VERDICT, PendingSample, Saver
from rlcli.rollout.worker.rollout_role import RolloutRole
from rlcli.rollout.worker.verdicts import Verification
from rlcli.rollout.worker.work_queue import RoundTasks
from rlcli.types import Outcome, Prompt, Sample, Verdict
from tests.groups import CalledByName

SAMPLES = 2


@dataclass(eq=False)
class Shard:
    """Stands in for a reference; rows: (prompt's id, seed) of each."""

    rows: list[tuple[str, int]]


class Workers(CalledByName):
    """Generates nothing, but reports as `count` workers would, last rank first. score: of (prompt's id, sample)."""

    def __init__(self, score: Callable[[str, int], float], count: int = 2, tensor_parallel: int = 1) -> None:
        self.score, self.count, self.tensor_parallel = score, count, tensor_parallel
        self.version = 1
        self.outcome = Outcome.OK
        self.greedy_outcome = Outcome.OK
        self.rounds: list[list[PromptTask]] = []
        self.calls: list[RolloutArguments] = []
        self.taken: list[Shard | None] = [None] * count
        self.shards: list[weakref.ref[Shard]] = []
        self.same_bits = True

    def __len__(self) -> int:
        return self.count

    def rollout(
        self, tasks: list[list[PromptTask]], arguments: RolloutArguments, queue: RoundTasks | None
    ) -> Iterator[Progress | RolloutBatch]:
        assert queue is None
        leaders = range(0, self.count, self.tensor_parallel)
        self.rounds.append(sorted((t for rank in leaders for t in tasks[rank]), key=lambda t: t.group))
        self.calls.append(arguments)
        for rank in reversed(range(self.count)):
            rank_tasks = tasks[rank] if rank in leaders else []
            yield Progress(sum(t.responses for t in rank_tasks))
            yield self.report(rank, rank_tasks, arguments)

    def report(self, rank: int, tasks: list[PromptTask], arguments: RolloutArguments) -> RolloutBatch:
        shard, samples = Shard([]), []
        for task in tasks:
            for index in range(task.samples):
                sample_number = task.first_sample + index
                verdict = Verdict(self.score(task.prompt.id, sample_number), self.outcome, detail="as told")
                row = len(shard.rows)
                shard.rows.append(
                    (
                        task.prompt.id,
                        sample_seed(arguments.seed, arguments.purpose, arguments.step, task.prompt.id, sample_number),
                    )
                )
                samples.append(Sample(task.group, index, rank, row, 4, 3, "stop", verdict, self.version))
        self.shards.append(weakref.ref(shard))
        baselines = {
            task.group: Verdict(10.0 + self.score(task.prompt.id, -1), self.greedy_outcome, detail="greedy")
            for task in tasks
            if task.greedy
        }
        self.taken[rank] = shard if samples else None
        tokens = sum(s.response_tokens for s in samples)
        table = SampleTable.of(samples[::-1])
        stats = RolloutStats(generated_tokens=tokens, version=self.version, generate_s=1.0, verify_s=0.5)
        return RolloutBatch(table, stats=stats, baselines=baselines)

    def take_shard(self) -> list[list[Shard | None]]:
        shards, self.taken = self.taken, [None] * self.count
        return [[shard] for shard in shards]

    def living(self) -> int:
        gc.collect()
        return sum(shard() is not None for shard in self.shards)


def source_of(
    workers: Workers,
    rows: int = 100,
    greedy: bool = False,
    save_as: Callable[[int], str] = lambda step: "",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    prompts_per_step: int = 4,
    crashes: float = 0.1,
    **rules: Any,
) -> SyncRollouts:
    config = RunConfig.model_validate(
        {
            "rollout": {
                "prompts_per_step": prompts_per_step,
                "samples_per_prompt": SAMPLES,
                "temperature": 0.7,
                "top_p": 0.9,
                "max_response_tokens": 16,
                "tensor_parallel": workers.tensor_parallel,
            },
            "cluster": {"workers": workers.count},
            "verifier": {"max_crash_rate": crashes},
            "dynamic_sampling": rules,
            "train": {"seed": 5},
        }
    )
    message_lists = [({"role": "user", "content": f"{i}?"},) for i in range(rows)]
    prompt = [Prompt(f"row:{i}", messages, "s", "math", "gsm8k", "3") for i, messages in enumerate(message_lists)]
    flat: np.ndarray = np.arange(4 * rows, dtype=np.int32)
    prompts = TokenizedPrompts(tuple(prompt), 0, flat, np.arange(0, 4 * rows + 1, 4))
    cursor = PromptCursor(rows, seed=0, shuffle=False)
    return SyncRollouts(
        workers,  # type: ignore[arg-type]
        prompts,
        cursor,
        config,
        save_as=save_as,
        greedy=greedy,
        on_progress=on_progress,
    )


def number(prompt_id: str) -> int:
    return int(prompt_id.removeprefix("row:"))


def unequal_where(good: Callable[[int], bool]) -> Callable[[str, int], float]:
    """Scores 0 and 1 in the groups of good rows, 0 in those of others."""
    return lambda prompt_id, sample: float(good(number(prompt_id)) and sample % 2 == 1)


def rows_of(batch: RolloutBatch) -> list[int]:
    """The dataset's row of each group, read through the shards: what training would be given."""
    rows: dict[int, set[int]] = {}
    for s in batch.samples:
        prompt_id, _ = batch.shards[s.shard].rows[s.row]
        rows.setdefault(s.prompt, set()).add(number(prompt_id))
    assert list(rows) == list(range(len(rows))), "groups are counted without gaps, in order"
    assert all(len(distinct) == 1 for distinct in rows.values())
    return [distinct.pop() for distinct in rows.values()]


def test_every_group_is_kept_in_one_round_unless_told_otherwise() -> None:
    workers = Workers(lambda prompt_id, sample: 0.0)
    source = source_of(workers, oversample=4.0)  # nothing is dropped, so more than is missing is never needed
    batches = [source.take(1), source.take(2)]
    assert [rows_of(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [len(tasks) for tasks in workers.rounds] == [4, 4]
    for batch in batches:
        stats = batch.stats
        assert (stats.rounds, stats.generated, stats.generated_tokens, stats.dropped) == (1, 8, 24, 0)
        assert (stats.carried_over, stats.stale, batch.baselines) == (0, 0, {})
        assert [s.sample for s in batch.samples] == [0, 1] * 4
        assert (batch.stats.generate_s, batch.stats.verify_s) == (1.0, 0.5)
    assert workers.calls[0].sampling == Sampling(0.7, 16, 0.9)
    assert (workers.calls[1].seed, workers.calls[1].purpose, workers.calls[1].step) == (5, "train", 2)


def test_dropped_groups_are_refilled_with_as_many_as_are_missing() -> None:
    workers = Workers(unequal_where(lambda row: row % 2 == 0))
    batch = source_of(workers, keep="unequal").take(1)
    assert [len(tasks) for tasks in workers.rounds] == [4, 2, 1]
    assert rows_of(batch) == [0, 2, 4, 6]
    assert (batch.stats.rounds, batch.stats.generated, batch.stats.dropped, batch.stats.carried_over) == (3, 14, 3, 0)
    assert (batch.stats.generate_s, batch.stats.verify_s) == (3.0, 1.5)
    # Of 7 groups 4 have one right sample of two; the batch itself is biased towards them.
    assert batch.stats.mean_score == pytest.approx(4 / 14)
    assert sum(s.verdict.score for s in batch.samples) / len(batch.samples) == 0.5


def test_accuracy_keeps_groups_between_its_bounds() -> None:
    scores = {0: (0, 0), 1: (1, 1), 2: (0, 1), 3: (0, 0.2), 4: (0.4, 0.4)}
    workers = Workers(lambda prompt_id, sample: float(scores[number(prompt_id) % 5][sample % 2]))
    source = source_of(workers, keep="accuracy", low=0.3, high=0.9)
    assert rows_of(source.take(1)) == [2, 4, 7, 9]


def test_good_groups_beyond_the_step_wait_and_come_first_in_the_next() -> None:
    workers = Workers(unequal_where(lambda row: row not in (1, 9)))
    source = source_of(workers, keep="unequal", oversample=1.5)
    first = source.take(1)
    assert rows_of(first) == [0, 2, 3, 4]  # of six
    assert (first.stats.carried_over, first.stats.stale) == (1, 0)
    workers.version = 2
    second = source.take(2)
    assert rows_of(second) == [5, 6, 7, 8]
    assert [len(tasks) for tasks in workers.rounds] == [6, 5]  # ceil of 3 missing × 1.5
    assert (second.stats.carried_over, second.stats.stale, second.stats.dropped) == (1, SAMPLES, 1)
    assert [s.version for s in second.samples] == [1, 1, 2, 2, 2, 2, 2, 2]
    assert rows_of(source.take(3))[0] == 10


def test_a_step_filled_by_waiting_groups_generates_nothing() -> None:
    workers = Workers(unequal_where(lambda row: True))
    source = source_of(workers, keep="unequal", oversample=3.0)
    batches = [source.take(step) for step in (1, 2, 3)]
    assert [batch.stats.rounds for batch in batches] == [1, 0, 1]
    assert [rows_of(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15]]
    second = batches[1].stats
    assert (second.generated, second.mean_score, second.generate_s, second.stale) == (0, 0.0, 0.0, 8)
    assert batches[2].stats.stale == 0


def test_ten_times_one_point_one_prompts_are_eleven() -> None:
    workers = Workers(unequal_where(lambda row: True))
    source_of(workers, keep="unequal", oversample=1.1, prompts_per_step=10).take(1)
    assert [len(tasks) for tasks in workers.rounds] == [11]


def test_tokens_live_only_as_long_as_a_waiting_group_needs_them() -> None:
    workers = Workers(unequal_where(lambda row: row != 4), count=3)
    source = source_of(workers, keep="unequal", oversample=1.5)
    batch = source.take(1)  # rows 0..5 on three workers, 4 dropped, 5 waits on worker 2
    assert (rows_of(batch), len(batch.shards), workers.living()) == ([0, 1, 2, 3], 3, 3)
    del batch
    assert (len(source.buffer.groups), workers.living()) == (1, 1)
    batch = source.take(2)
    assert rows_of(batch) == [5, 6, 7, 8]
    del batch
    source.buffer.clear()
    assert workers.living() == 0


def test_where_the_rounds_run_out_the_good_groups_are_trained_on() -> None:
    workers = Workers(unequal_where(lambda row: row in (0, 5)))
    batch = source_of(workers, keep="unequal", max_batches=2).take(1)
    assert rows_of(batch) == [0, 5]
    assert (batch.stats.rounds, batch.stats.dropped, [len(tasks) for tasks in workers.rounds]) == (2, 5, [4, 3])


def test_a_step_without_one_good_group_ends_the_run_with_its_figures() -> None:
    workers = Workers(lambda prompt_id, sample: 1.0)
    with pytest.raises(RunFailed, match=r"kept none of the 12 groups of step 7, in 3 rounds; .* 24 samples is 1") as e:
        source_of(workers, keep="unequal", max_batches=3).take(7)
    assert "dynamic_sampling.keep = all" in e.value.hint


def test_failed_verifications_end_the_run_before_they_count_as_too_hard() -> None:
    workers = Workers(lambda prompt_id, sample: 0.0)
    workers.outcome = Outcome.CRASH
    says = r"8 of 8 verifications crashed.*rate = 0\.1: row:0, gsm8k: «as told»; row:1, .*; row:2, gsm8k: [^;]*; fix"
    with pytest.raises(RunFailed, match=says):
        source_of(workers, keep="unequal").take(1)
    assert source_of(workers, crashes=1.0).take(1).stats.generated == 8


def test_more_than_half_killed_end_the_run_at_any_allowed_crash_rate() -> None:
    class Killed(Workers):
        """Rows below `slow` are killed at the deadline."""

        slow = 2

        def report(self, rank: int, tasks: list[PromptTask], arguments: RolloutArguments) -> RolloutBatch:
            report, row = super().report(rank, tasks, arguments), {t.group: number(t.prompt.id) for t in tasks}
            killed = [
                replace(s, verdict=replace(s.verdict, outcome=Outcome.TIMEOUT)) if row[s.prompt] < self.slow else s
                for s in report.samples
            ]
            return replace(report, samples=SampleTable.of(killed))

    workers = Killed(lambda prompt_id, sample: 0.0)
    assert source_of(workers, crashes=0.0).take(1).stats.generated == 8  # half of them
    workers.slow = 3
    with pytest.raises(RunFailed, match=r"6 of 8 verifications were killed at the deadline: row:0, .*deadline_s"):
        source_of(workers, crashes=1.0).take(1)


def test_groups_are_judged_by_the_samples_that_count() -> None:
    """A failed verification is no zero beside a one: a group that is otherwise equal, or has one left, is no good."""

    class Failing(Workers):
        def report(self, rank: int, tasks: list[PromptTask], arguments: RolloutArguments) -> RolloutBatch:
            report, row = super().report(rank, tasks, arguments), {t.group: number(t.prompt.id) for t in tasks}
            failed = [
                replace(s, verdict=Verdict(0.0, Outcome.TIMEOUT)) if row[s.prompt] == 1 and s.sample == 0 else s
                for s in report.samples
            ]
            return replace(report, samples=SampleTable.of(failed))

    workers = Failing(unequal_where(lambda row: row != 3))
    batch = source_of(workers, keep="unequal", prompts_per_step=2).take(1)
    assert rows_of(batch) == [0, 2]
    assert batch.stats.mean_score == pytest.approx(3 / 5)  # of six samples
    accuracy = source_of(Failing(workers.score), keep="accuracy", low=0.4, high=1.0, prompts_per_step=2)
    assert rows_of(accuracy.take(1)) == [0, 2]
    groups = source_of(Failing(workers.score), prompts_per_step=2).take(1)
    assert rows_of(groups) == [0, 1]  # whole groups: what does not count is left out when the step is trained on


def test_few_failures_are_weighed_against_all_samples_of_the_step() -> None:
    class LateCrash(Workers):
        def report(self, rank: int, tasks: list[PromptTask], arguments: RolloutArguments) -> RolloutBatch:
            self.outcome = Outcome.CRASH if len(self.rounds) == 2 else Outcome.OK
            return super().report(rank, tasks, arguments)

    workers = LateCrash(unequal_where(lambda row: row != 0))
    assert source_of(workers, keep="unequal", crashes=0.2).take(1).stats.rounds == 3  # 2 of 10, then 2 of 12
    with pytest.raises(RunFailed, match="2 of 10"):
        source_of(LateCrash(workers.score), keep="unequal", crashes=0.19).take(1)


def test_a_prompt_repeated_in_a_step_gets_new_samples_in_any_round() -> None:
    workers = Workers(unequal_where(lambda row: row == 2))
    source = source_of(workers, rows=3, keep="unequal", oversample=2.0, max_batches=3)
    batch = source.take(1)  # 8 prompts of 3 rows: 2 good groups; then 4: 1 or 2 more
    prompt_samples = [(t.prompt.id, t.first_sample) for tasks in workers.rounds for t in tasks]
    assert len(workers.rounds) == 2
    assert len(set(prompt_samples)) == len(prompt_samples) == 12
    assert sorted(first for prompt_id, first in prompt_samples if prompt_id == "row:1") == [0, 2, 4, 6]
    seeds = [batch.shards[s.shard].rows[s.row] for s in batch.samples]
    assert len(set(seeds)) == len(seeds) == 8
    workers.rounds.clear()
    source.take(2)
    assert min(t.first_sample for t in workers.rounds[0]) == 0  # the step is part of the seed


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    good=st.lists(st.booleans(), min_size=7, max_size=7).filter(any),
    layout=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2), (6, 3)]),
    oversample=st.sampled_from([1.0, 1.4, 3.0]),
    greedy=st.booleans(),
)
def test_what_is_sampled_does_not_depend_on_the_layout_of_the_workers(
    good: list[bool], layout: tuple[int, int], oversample: float, greedy: bool
) -> None:
    def steps(count: int, tensor_parallel: int) -> list[Any]:
        workers = Workers(unequal_where(lambda row: good[row % 7]), count, tensor_parallel)
        source = source_of(workers, 17, greedy, keep="unequal", oversample=oversample)
        batches = [source.take(step) for step in (1, 2, 3)]
        return [
            (
                [(s.prompt, s.sample, s.verdict, *b.shards[s.shard].rows[s.row]) for s in b.samples],
                (b.stats.rounds, b.stats.generated, b.stats.dropped, b.stats.carried_over, b.stats.stale, b.baselines),
            )
            for b in batches
        ]

    sampled = steps(*layout)
    assert sampled == steps(1, 1)
    for samples, _ in sampled:
        assert all(good[number(prompt_id) % 7] for *_, prompt_id, _ in samples)


def test_a_greedy_baseline_whose_verification_crashed_is_no_zero() -> None:
    workers = Workers(lambda prompt_id, sample: 1.0)
    workers.greedy_outcome = Outcome.CRASH
    with pytest.raises(RunFailed, match=r"4 of 12 verifications crashed.*«greedy»"):
        source_of(workers, greedy=True).take(1)


def test_greedy_baselines_stay_with_their_group() -> None:
    def score(prompt_id: str, sample: int) -> float:
        """Of the greedy response (sample −1) the row's number."""
        return float(number(prompt_id)) if sample < 0 else float(number(prompt_id) % 2 and sample % 2)

    heard: list[tuple[int, int]] = []
    workers = Workers(score)
    source = source_of(
        workers,
        keep="unequal",
        oversample=1.5,
        greedy=True,
        on_progress=lambda done, total: heard.append((done, total)),
    )
    first, second = source.take(1), source.take(2)
    assert rows_of(first) == [1, 3, 5, 7]
    assert {prompt: verdict.score for prompt, verdict in first.baselines.items()} == {
        0: 11.0,
        1: 13.0,
        2: 15.0,
        3: 17.0,
    }
    assert rows_of(second) == [9, 11, 13, 15]
    assert {prompt: verdict.score for prompt, verdict in second.baselines.items()} == {
        0: 19.0,
        1: 21.0,
        2: 23.0,
        3: 25.0,
    }
    assert (first.stats.generated, len(first.samples)) == (16, 8)  # 6 and 2 prompts; greedy responses are not counted
    assert heard[:4] == [(9, 18), (18, 18), (21, 24), (24, 24)]  # three responses a prompt, round after round


def test_each_round_saves_its_samples_to_a_file_of_its_own(tmp_path: Path) -> None:
    workers = Workers(unequal_where(lambda row: row % 2 == 0))
    source_of(workers, save_as=lambda step: samples_path(tmp_path, step), keep="unequal").take(1)
    assert [str(Path(call.save_as.format(rank=0)).relative_to(tmp_path)) for call in workers.calls] == [
        "step-000001/rank-0.parquet",
        "step-000001/rank-0.round-2.parquet",
        "step-000001/rank-0.round-3.parquet",
    ]
    first = [call.first_group for call in workers.calls]
    assert first == [0, *np.cumsum([len(tasks) for tasks in workers.rounds[:-1]]).tolist()]
    unsaved = Workers(unequal_where(lambda row: row % 2 == 0))
    source_of(unsaved, keep="unequal").take(1)
    assert [call.save_as for call in unsaved.calls] == ["", "", ""]


class Engine:
    """Answers with the request's seed, or with 0 where it is greedy; the last request first."""

    slots = 8

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.unfinished = 0

    def begin(self, sampling: Sampling) -> None:
        self.requests = []

    def add(self, request: GenerationRequest) -> None:
        self.requests.append(request)
        self.unfinished += 1

    def step(self) -> list[Generation]:
        self.unfinished -= 1
        request = self.requests[self.unfinished]
        token = 0 if request.greedy else request.seed % 1000 + 1
        return [Generation(request.key, np.array([token], np.int32), np.array([-0.5], np.float32), "stop")]


class Scorer:
    """A response's score is its number, which is its only token."""

    def submit(self, prompt: Prompt, tokens: bytes, spare: int, fields: Mapping[str, Any]) -> Future[Scored]:
        [number] = array("i", tokens)
        done: Future[Scored] = Future()
        done.set_result(Scored(str(number), Verdict(float(number), Outcome.OK)))
        return done


def test_a_greedy_response_is_scored_but_not_in_samples_shard_or_texts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    # A reference within what a worker streams may be lost on the way, and whoever gets it hangs.
    monkeypatch.setattr("ray.put", lambda value: pytest.fail("a rollout puts nothing into the object store"))
    engine = Engine()
    role = RolloutRole(0, engine, Scorer())  # type: ignore[arg-type]
    source = Prompt("row:0", ({"role": "user", "content": "?"},), "s", "math", "gsm8k", "3")
    tokens = np.array([7, 8], np.int32)
    tasks = [PromptTask(0, tokens, source, 2, greedy=True), PromptTask(3, tokens, source, 2, first_sample=2)]
    arguments = RolloutArguments(Sampling(1.0, 4), 0, "train", 1, str(tmp_path / "rank-{rank}.parquet"), first_group=6)
    *progress, report = role.run(tasks, arguments)
    assert [request.greedy for request in engine.requests] == [False, False, True, False, False]
    assert isinstance(report, RolloutBatch)
    assert sum(item.finished for item in progress if isinstance(item, Progress)) == 5
    assert report.baselines == {0: Verdict(0.0, Outcome.OK)}
    assert sorted((s.prompt, s.sample) for s in report.samples) == [(0, 0), (0, 1), (3, 0), (3, 1)]
    shard = role.take_shard()
    assert shard is not None
    assert len(shard) == 4
    assert role.take_shard() is None
    for s in report.samples:
        assert (shard.row(s.row).response_ids.tolist(), s.verdict.score > 0) == ([s.verdict.score], True)
    role.finish_saving()
    table = pq.read_table(tmp_path / "rank-0.parquet")
    assert len(role.texts(9)) == len(table) == 4
    assert table.column("left_out").to_pylist() == [None] * 4
    assert table.column("group").to_pylist() == [6 + s.prompt for s in report.samples]
    assert [(s.saved_step, s.saved_group) for s in report.samples] == [(1, 6 + s.prompt) for s in report.samples]


def test_the_baseline_of_a_response_cut_off_is_zero_where_its_reward_is() -> None:
    class Cut(Engine):
        def step(self) -> list[Generation]:
            return [replace(generation, finish_reason="length") for generation in super().step()]

    class Right:
        def submit(self, prompt: Prompt, tokens: bytes, spare: int, fields: Mapping[str, Any]) -> Future[Scored]:
            assert fields == {"finish_reason": "length", "thinking": True}
            done: Future[Scored] = Future()
            done.set_result(Scored("", Verdict(1.0, Outcome.OK)))
            return done

    source = Prompt("row:0", ({"role": "user", "content": "?"},), "s", "math", "gsm8k", "3")
    task = PromptTask(0, np.array([7, 8], np.int32), source, 2, greedy=True)
    for rule, score in (("keep", 1.0), ("mask", 1.0), ("zero_reward", 0.0)):
        role = RolloutRole(0, Cut(), Right(), thinking=True)  # type: ignore[arg-type]
        arguments = RolloutArguments(Sampling(1.0, 4), 0, "train", 1, truncated=rule)  # type: ignore[arg-type]
        *_, report = role.run([task], arguments)
        assert isinstance(report, RolloutBatch)
        assert report.baselines[0].score == score


def test_the_token_that_ended_a_response_is_no_part_of_its_text() -> None:
    """This holds for special and for ordinary tokens of the tokenizer."""
    source = Prompt("row:0", ({"role": "user", "content": "?"},), "s", "math", "gsm8k", "3")
    task = PromptTask(0, np.array([7, 8], np.int32), source, 1)
    for stops, text in (((9,), [5]), ((8,), [5, 9]), ((), [5, 9])):
        verification = Verification(Texts(), stop_token_ids=frozenset(stops))  # type: ignore[arg-type]
        trajectory = Trajectory.single(task.tokens, np.array([5, 9], np.int32), np.zeros(2, np.float32))
        scored = verification.submit(task, trajectory)
        assert scored.result().text == str(text)


class Texts:
    def submit(self, prompt: Prompt, tokens: bytes, spare: int, fields: Mapping[str, Any]) -> Future[Scored]:
        ids = array("i", tokens).tolist()
        assert ids == [5, 9]
        done: Future[Scored] = Future()
        done.set_result(Scored(str(ids[: len(ids) - spare]), Verdict(1.0, Outcome.OK)))
        return done


def test_saved_samples_say_why_they_are_left_out(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    source = Prompt("row:0", ({"role": "user", "content": "?"},), "s", "math", "gsm8k", "3")
    reasons = {}
    for rule in ("mask", "keep", ""):
        saver = Saver(str(tmp_path / f"{rule}.parquet"), 0, 1, rule)  # type: ignore[arg-type]
        for index, (outcome, finish) in enumerate([("crash", "stop"), ("wrong", "length"), ("ok", "stop")]):
            scored: Future[Scored] = Future()
            scored.set_result(Scored("1", Verdict(0.0, Outcome(outcome))))
            row = Sample(0, index, 0, index, 2, 1, finish, PLACEHOLDER_VERDICT, 1)  # type: ignore[arg-type]
            saver.add([PendingSample(source, row, scored, None, 0, 0)])
        saver.save_rest()
        reasons[rule] = pq.read_table(tmp_path / f"{rule}.parquet").column("left_out").to_pylist()
    assert reasons == {"mask": ["crash", "truncated", None], "keep": ["crash", None, None], "": [None] * 3}


def test_samples_verified_after_the_first_write_are_added_to_the_file(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    source = Prompt("row:0", ({"role": "user", "content": "?"},), "s", "math", "gsm8k", "3")
    saver = Saver(str(tmp_path / "rank-{rank}.parquet"), 0, 1)
    for index in range(3):
        scored: Future[Scored] = Future()
        scored.set_result(Scored(str(index), Verdict(0.0, Outcome.OK)))
        row = Sample(0, index, 0, 0, 2, 1, "stop", PLACEHOLDER_VERDICT, 1)
        saver.add([PendingSample(source, row, scored, None, 0, 0)])
        saver.save_rest()
        saver.save_rest()
    assert pq.read_table(tmp_path / "rank-0.parquet").column("response").to_pylist() == ["0", "1", "2"]
    assert len(saver.rows) == 3


def mixture_of(workers: Workers, unit: Unit, **rules: Any) -> SyncRollouts:
    """Rows 0 to 19 are the set a, 20 to 29 the set b, of which half as much is drawn."""
    source = source_of(workers, rows=30, **rules)
    rows = source.prompts.prompts
    source.prompts = replace(source.prompts, prompts=JoinedPrompts([rows[:20], rows[20:]], ["a", "b"]))
    source.cursor = MixedCursor(["a", "b"], [0, 20, 30], [2.0, 1.0], seed=5, shuffle=True, unit=unit)
    return source


@pytest.mark.parametrize("unit", ["prompts", "tokens"])
def test_several_sets_resume_exactly_whatever_is_refilled_and_waits(unit: Unit) -> None:
    rules = {"keep": "unequal", "oversample": 1.5, "max_batches": 30}
    workers = Workers(unequal_where(lambda row: row % 3 != 0))
    uninterrupted, counts = mixture_of(workers, unit, **rules), Counter[str]()
    parts = mixture_of(Workers(workers.score), unit, **rules)
    waited = False
    for step in range(1, 13):
        batch, resumed_batch = uninterrupted.take(step), parts.take(step)
        assert rows_of(batch) == rows_of(resumed_batch)
        assert batch.sources == resumed_batch.sources == ["a" if row < 20 else "b" for row in rows_of(batch)]
        waiting, shards = groups_to_json(parts.buffer.groups)
        waited |= bool(waiting)
        state = json.loads(json.dumps(parts.cursor.state()))
        parts = mixture_of(Workers(workers.score), unit, **rules)
        parts.cursor = parts.cursor.restored(state)
        parts.buffer.restore(groups_from_json(json.loads(json.dumps(waiting)), shards))
    counts.update("a" if number(task.prompt.id) < 20 else "b" for tasks in workers.rounds for task in tasks)
    assert waited
    assert counts["a"] == pytest.approx(2 * counts["b"], abs=2)


def test_samples_that_were_generated_ahead_keep_their_sets() -> None:
    source = mixture_of(Workers(unequal_where(lambda row: True)), "prompts")
    source.config = source.config.changed(async_={"staleness": 1, "engine_steps": 0}, rollout={"workers": 1})
    prefetcher = Prefetcher(source, True, 9, lambda: None)
    prefetcher.take(1)
    prefetcher.wait()
    state, shards = source.state()
    assert source.has_started
    sources = prefetcher.take(2).sources
    prefetcher.wait()
    source.restore(json.loads(json.dumps(state)), shards)
    assert source.take(2).sources == sources


def test_an_evaluation_of_several_sets_reports_each_and_all() -> None:
    workers = Workers(lambda prompt_id, sample: 1.0)
    prompts = mixture_of(workers, "prompts").prompts
    config = RunConfig().changed(evaluation={"samples": 2, "temperature": 1.0}, rollout={"max_response_tokens": 16})
    report = evaluate(workers, prompts, config)  # type: ignore[arg-type]
    assert (report.prompts, report.sets["a"].prompts, report.sets["b"].prompts) == (30, 20, 10)
    assert report.sets["b"].samples == 20
    metrics, summary = report.metrics(), report.as_dict()
    assert metrics["a/pass@1"] == metrics["pass@1"] == summary["datasets"]["b"]["pass"]["pass@1"]["mean"] == 1.0
    assert "(a 100.0%" in report.headline()
    alone = evaluate(workers, source_of(workers, rows=3).prompts, config)  # type: ignore[arg-type]
    assert (alone.sets, "datasets" in alone.as_dict(), "(" in alone.headline()) == ({}, False, False)


class Judging(Workers):
    """Samples are right if their score is 1."""

    def report(self, rank: int, tasks: list[PromptTask], arguments: RolloutArguments) -> RolloutBatch:
        report = super().report(rank, tasks, arguments)
        outcome = {True: Outcome.OK, False: Outcome.WRONG}
        marked = [replace(s, verdict=replace(s.verdict, outcome=outcome[s.verdict.score == 1])) for s in report.samples]
        return replace(report, samples=SampleTable.of(marked))


def selecting_source(workers: Workers, sampling: str) -> SyncRollouts:
    """Rows 0 to 11; of its groups of two samples those of every third row are equal."""
    source = source_of(workers, rows=12, keep="unequal", max_batches=30, prompts_per_step=3)
    source.config = source.config.changed(data={"sampling": sampling, "retire": 2})
    source.cursor = build_cursor(source.prompts.prompts, source.config)
    return source


@pytest.mark.parametrize("sampling", ["uniform", "thompson", "difficulty"])
def test_prompts_drawn_by_their_pass_rates_resume_exactly(sampling: str) -> None:
    def score(prompt_id: str, sample: int) -> float:
        row = number(prompt_id)
        return float(row % 3 == 2 or (row % 3 == 1 and sample % 2 == 1))

    uninterrupted, parts = (selecting_source(Judging(score), sampling) for _ in range(2))
    for step in range(1, 9):
        batch, resumed_batch = uninterrupted.take(step), parts.take(step)
        assert rows_of(batch) == rows_of(resumed_batch)
        assert (batch.scored_groups, batch.selection) == (resumed_batch.scored_groups, resumed_batch.selection)
        assert len(batch.scored_groups) * SAMPLES == batch.stats.generated
        assert sum(selected for *_, selected in batch.scored_groups) == len(rows_of(batch))
        assert {(number(name) % 3, right) for name, _, right, _, _ in batch.scored_groups} <= {(0, 0), (1, 1), (2, 2)}
        state = json.loads(json.dumps(parts.cursor.state()))
        parts = selecting_source(Judging(score), sampling)
        parts.cursor = parts.cursor.restored(state)
    assert batch.selection["prompts/seen"] == 1.0
    assert 0.0 < batch.selection["prompts/retired"] <= 1 / 3


def test_what_was_judged_is_kept_with_what_was_generated_ahead() -> None:
    source, other = (selecting_source(Judging(unequal_where(lambda row: row % 2 == 1)), "thompson") for _ in range(2))
    for each_source in (source, other):
        each_source.config = each_source.config.changed(
            async_={"staleness": 1, "engine_steps": 0}, rollout={"workers": 1}
        )
    prefetcher = Prefetcher(source, True, 9, lambda: None)
    prefetcher.take(1)
    prefetcher.wait()
    state, shards = source.state()
    cursor = json.loads(json.dumps(source.cursor.state()))
    other.cursor = other.cursor.restored(cursor)
    other.restore(json.loads(json.dumps(state)), shards)
    restored, batch = other.take(2), prefetcher.take(2)
    prefetcher.wait()
    assert source.has_started
    assert restored.scored_groups == batch.scored_groups
    assert restored.selection == batch.selection != {}
    assert len(batch.scored_groups) > len(rows_of(batch))


def test_a_group_is_judged_by_the_samples_that_count() -> None:
    config = RunConfig.model_validate({"train": {"truncated": "zero_reward"}})

    def sample(index: int, outcome: Outcome, stop: Any = "stop") -> Sample:
        return Sample(0, index, 0, index, 4, 3, stop, Verdict(1.0, outcome), 1)

    some = SampleTable.of(
        [sample(0, Outcome.OK), sample(1, Outcome.WRONG), sample(2, Outcome.CRASH), sample(3, Outcome.OK, "length")]
    )
    assert correct_and_scored(some, config) == (1, 3), "the third has no verdict, and the fourth is cut off"
    assert correct_and_scored(some, config.changed(train={"truncated": "mask"})) == (1, 2)
    assert correct_and_scored(some, config.changed(train={"truncated": "keep"})) == (2, 3)
    group = Group(1, samples=some, prompt_id="a:0")
    twin = replace(group)
    assert scored_groups([group, twin], [twin], config) == [("a:0", 3, 1, 12, False), ("a:0", 3, 1, 12, True)]
