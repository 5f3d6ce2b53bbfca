"""The long tail: engines take groups as they have room, a round ends before all is finished, and the rest continues."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from rlcli.config.schema import RunConfig
from rlcli.data.messages import PartialRollout, Progress, PromptTask, RolloutBatch, sample_seed
from rlcli.data.prompts.cursor import PromptCursor
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.data.sample_shard import SampleShard
from rlcli.rewards.service.scoring_client import Scored
from rlcli.rollout.engine import Generation, GenerationRequest, Sampling
from rlcli.rollout.rollout_arguments import RolloutArguments
from rlcli.rollout.scheduler.dispatcher import assign, gather
from rlcli.rollout.scheduler.group_checkpoint import groups_from_json, groups_to_json
from rlcli.rollout.scheduler.rollouts import Rollouts
from rlcli.rollout.scheduler.sync_rollouts import SyncRollouts
from rlcli.rollout.worker.rollout_role import RolloutRole
from rlcli.rollout.worker.work_queue import NO_SHARED_TASKS, RoundTasks, WorkGrant, WorkQueue
from rlcli.types import Outcome, Prompt, Verdict
from tests.groups import CalledByName

SAMPLES, LIMIT, END = 3, 40, 0


def task(position: int, responses: int = 2, prompt_tokens: int = 4, prefix_tokens: int = 0) -> PromptTask:
    source = Prompt(f"row:{position}", ({"role": "user", "content": "?"},), "s", "math", "gsm8k", "3")
    partials = {0: PartialRollout(position, 0, 0, 0, prefix_tokens, 1)} if prefix_tokens else {}
    return PromptTask(position, np.arange(prompt_tokens, dtype=np.int32), source, responses, partial=partials)


def positions(shares: list[list[PromptTask]]) -> list[list[int]]:
    return [[task.group for task in share] for share in shares]


def test_equal_tasks_are_assigned_in_turn_and_the_rest_stays_in_order() -> None:
    tasks = [task(position) for position in range(7)]
    shares, remaining = assign(tasks, 2, LIMIT)
    assert (positions(shares), remaining) == ([[0, 2, 4, 6], [1, 3, 5]], [])
    shares, remaining = assign(tasks, 2, LIMIT, slots=4)
    assert positions(shares) == [[0, 2], [1, 3]]
    assert [waiting_task.group for waiting_task in remaining] == [4, 5, 6]
    assert positions(assign(tasks[:1], 2, LIMIT, slots=1)[0]) == [[0], []]  # a group is never divided


def test_resumed_then_large_groups_are_assigned_to_the_least_loaded() -> None:
    sizes = [100, 3000, 100, 900, 1000, 1100]
    shares, _ = assign([task(i, prompt_tokens=size) for i, size in enumerate(sizes)], 2, LIMIT)
    assert positions(shares) == [[1, 0], [5, 4, 3, 2]]
    shares, remaining = assign([task(0, prompt_tokens=3000), task(1, prefix_tokens=30), task(2)], 1, LIMIT, slots=2)
    assert (positions(shares), [waiting_task.group for waiting_task in remaining]) == ([[1]], [0, 2])


def test_groups_of_earlier_steps_come_first_at_any_length() -> None:
    older = replace(task(1, prompt_tokens=2), step=3)
    oldest = replace(task(2, prompt_tokens=1), step=2)
    _, remaining = assign([replace(task(0, prompt_tokens=3000), step=4), older, oldest], 1, LIMIT, slots=1)
    assert [waiting_task.group for waiting_task in remaining] == [1, 0]


def test_each_group_of_a_queue_is_taken_once_and_only_if_it_fits() -> None:
    queue, counters = RoundTasks("round", [task(i) for i in range(5)], None), HashStore()
    first, other = WorkQueue(queue, counters), WorkQueue(queue, counters)
    assert first.exchange(0, 0) == WorkGrant()
    assert first.exchange(0, 3) == WorkGrant((0, 1))  # its last one waits for a slot within the engine
    assert other.exchange(0, 2) == WorkGrant((2,))
    assert first.exchange(1, 9) == WorkGrant((3, 4), done=False)
    assert first.exchange(0, 9) == other.exchange(0, 9) == WorkGrant(done=True)


def test_a_round_ends_for_all_when_enough_groups_are_finished_by_whomever() -> None:
    queue, counters = RoundTasks("round", [], 3), HashStore()
    first, other = WorkQueue(queue, counters), WorkQueue(queue, counters)
    assert first.exchange(2, 4) == WorkGrant(done=True)
    assert other.exchange(1, 4) == WorkGrant(stop=True, done=True)
    first._last_poll = 0.0  # some time has passed
    assert first.exchange(0, 4).stop
    assert not WorkQueue(RoundTasks("the next", [], 3), counters).exchange(1, 4).stop


def token(seed: int, position: int) -> int:
    """Of a response: drawn by its seed and its place, END with one chance in eight."""
    return int(np.random.default_rng([seed, position]).integers(0, 8))


class Engine:
    """Draws a token of each of its `slots` oldest requests in a step. Its log-probs are the version of its weights, so
    that each token tells which policy drew it. wait: called before each step."""

    def __init__(self, slots: int, wait: Any = lambda: None) -> None:
        self.slots, self.wait, self.version = slots, wait, 0
        self.under_way: dict[int, tuple[GenerationRequest, list[int]]] = {}
        self.requests: list[GenerationRequest] = []
        self.max_unfinished = 0

    @property
    def unfinished(self) -> int:
        return len(self.under_way)

    def begin(self, sampling: Sampling) -> None:
        assert not self.under_way
        self.limit = sampling.max_tokens

    def add(self, request: GenerationRequest) -> None:
        self.requests.append(request)
        self.under_way[request.key] = (request, [])
        self.max_unfinished = max(self.max_unfinished, self.unfinished)

    def step(self) -> list[Generation]:
        self.wait()
        finished = []
        for key, (request, tokens) in list(self.under_way.items())[: self.slots]:
            position = len(tokens) + (0 if request.response_prefix is None else len(request.response_prefix))
            tokens.append(token(request.seed, position))
            if tokens[-1] == END or position + 1 == self.limit:
                finished.append(self._of(key, "stop" if tokens[-1] == END else "length"))
        return finished

    def abort(self) -> list[Generation]:
        return [self._of(key, None) for key in list(self.under_way)]

    def agree(self, value: Any) -> Any:
        return value

    def _of(self, key: int, reason: Any) -> Generation:
        _, tokens = self.under_way.pop(key)
        log_probs: np.ndarray = np.full(len(tokens), -float(self.version), np.float32)
        return Generation(key, np.array(tokens, np.int32), log_probs, reason)


class Scorer:
    """A response's score is the number of its tokens."""

    def submit(self, prompt: Prompt, tokens: bytes, spare: int, fields: Any) -> Future[Scored]:
        done: Future[Scored] = Future()
        done.set_result(Scored(str(tokens), Verdict(float(len(tokens) // 4), Outcome.OK)))
        return done


class Workers(CalledByName):
    """Real rollout roles, each with an engine of its own, that run at once."""

    def __init__(self, engines: list[Engine], same_bits: bool = False) -> None:
        counters = HashStore()
        self.queue: RoundTasks | None = None
        self.same_bits = same_bits
        self.engines = engines
        self.roles = [RolloutRole(i, engine, Scorer()) for i, engine in enumerate(engines)]  # type: ignore[arg-type]
        for role in self.roles:
            role.counters = counters

    def __len__(self) -> int:
        return len(self.roles)

    def load(self, version: int) -> None:
        for role, engine in zip(self.roles, self.engines, strict=True):
            role.version = engine.version = version

    def rollout(
        self, tasks: list[list[PromptTask]], arguments: RolloutArguments, queue: RoundTasks | None
    ) -> Iterator[Progress | RolloutBatch]:
        self.dealt, self.queue = tasks, queue

        def run(rank: int) -> list[Progress | RolloutBatch]:
            return list(self.roles[rank].run(tasks[rank], arguments, self.queue or NO_SHARED_TASKS))

        with ThreadPoolExecutor(len(self)) as pool:
            for items in pool.map(run, range(len(self))):
                yield from items

    def take_shard(self) -> list[list[SampleShard | None]]:
        return [[role.take_shard()] for role in self.roles]


def test_an_engine_with_short_responses_takes_more_of_the_queue() -> None:
    halted = threading.Event()
    slow, fast = Engine(4, wait=lambda: halted.wait(60)), Engine(4)
    workers = Workers([slow, fast])
    arguments = RolloutArguments(Sampling(1.0, LIMIT), 0, "train", 1)
    request_count = 0

    def counting() -> None:
        nonlocal request_count
        request_count = len(fast.requests)
        if request_count == 2 * 11:  # all but what the slow one was dealt, which does nothing meanwhile
            halted.set()

    fast.wait = counting
    reports = gather(workers, [task(i) for i in range(13)], arguments, slots=4)  # type: ignore[arg-type]
    assert sorted(len(report.samples) for report in reports) == [4, 22]
    assert fast.max_unfinished <= 5  # its slots, and the rest of a group


def test_where_every_run_is_to_give_the_same_bits_shares_are_fixed() -> None:
    workers = Workers([Engine(4), Engine(4)], same_bits=True)
    arguments = RolloutArguments(Sampling(1.0, LIMIT), 0, "train", 1)
    gather(workers, [task(i) for i in range(13)], arguments, slots=4)  # type: ignore[arg-type]
    assert workers.queue is None
    assert positions(workers.dealt) == [[0, 2, 4, 6, 8, 10, 12], [1, 3, 5, 7, 9, 11]]
    unequal = Workers([Engine(4), Engine(4)], same_bits=True)
    gather(unequal, [task(i) for i in range(13)], arguments, slots=4, until=9)  # type: ignore[arg-type]
    assert unequal.queue is not None
    assert len(unequal.queue.tasks) == 9


def source_of(
    workers: Workers,
    greedy: bool = False,
    oversample: float = 1.5,
    kind: type[Rollouts] = SyncRollouts,
    **rules: Any,
) -> Rollouts:
    config = RunConfig.model_validate(
        {
            "rollout": {
                "prompts_per_step": 4,
                "samples_per_prompt": SAMPLES,
                "max_response_tokens": LIMIT,
                "max_concurrent": workers.engines[0].slots,
                "oversample": oversample,
            },
            "cluster": {"workers": len(workers)},
            "dynamic_sampling": rules,
            "train": {"seed": 5},
        }
    )
    rows = 50
    prompt = [Prompt(f"row:{i}", ({"role": "user", "content": "?"},), "s", "math", "gsm8k", "3") for i in range(rows)]
    flat: np.ndarray = np.repeat(np.arange(rows, dtype=np.int32), 4)
    prompts = TokenizedPrompts(tuple(prompt), 0, flat, np.arange(0, 4 * rows + 1, 4))
    return kind(
        workers,  # type: ignore[arg-type]
        prompts,
        PromptCursor(rows, seed=0, shuffle=False),
        config,
        save_as=lambda step: "",
        greedy=greedy,
        on_progress=lambda done, total: None,
    )


def whole_response(row: int, sample: int, step: int) -> list[int]:
    """The response to a row without interruption. step: in which it started."""
    seed, tokens = sample_seed(5, "train", step, f"row:{row}", sample), list[int]()
    while len(tokens) < LIMIT and (not tokens or tokens[-1] != END):
        tokens.append(token(seed, len(tokens)))
    return tokens


def check(batch: RolloutBatch, step: int) -> list[int]:
    """Checks that each response continues the one that was started, and that each token has the log-prob of the version
    that sampled it. Returns the rows."""
    assert len(batch.samples) == 4 * SAMPLES
    assert [(s.prompt, s.sample) for s in batch.samples] == [(p, i) for p in range(4) for i in range(SAMPLES)]
    rows: dict[int, int] = {}
    for s in batch.samples:
        trajectory = batch.shards[s.shard].row(s.row)
        row = rows.setdefault(s.prompt, int(trajectory.tokens[0]))
        assert trajectory.tokens[: s.prompt_tokens].tolist() == [row] * 4
        response = trajectory.response_ids.tolist()
        assert response in [whole_response(row, s.sample, began) for began in range(1, step + 1)]
        assert len(response) == s.response_tokens == s.verdict.score == len(trajectory.tokens) - s.prompt_tokens
        # A span for each version that drew some of it.
        drawn_by = [version for span in trajectory.spans[1:] for version in [span.version] * (span.end - span.start)]
        assert drawn_by == (-trajectory.log_probs).tolist() == sorted(drawn_by)
        assert trajectory.versions == sorted(set(drawn_by))
        assert (s.version, s.version + s.newer_by, s.turns) == (drawn_by[0], drawn_by[-1], 1)
        assert drawn_by[-1] <= step
    return [rows[prompt] for prompt in range(4)]


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(
    slots=st.sampled_from([2, 6, 32]),
    engines=st.integers(1, 3),
    oversample=st.sampled_from([1.25, 2.0, 4.0]),
    greedy=st.booleans(),
    resumed=st.booleans(),
)
def test_what_a_step_breaks_off_goes_on_in_the_next_from_where_it_was(
    slots: int, engines: int, oversample: float, greedy: bool, resumed: bool
) -> None:
    workers = Workers([Engine(slots) for _ in range(engines)])
    source = source_of(workers, greedy, oversample)
    seen: list[int] = []
    for step in range(1, 7):
        workers.load(step)
        partials = {
            (group.prompt_index, partial.sample)
            for group in source.buffer.groups
            for partial in group.partial
            if partial.tokens  # one without is drawn by this step's weights alone
        }
        batch = source.take(step)
        rows = check(batch, step)
        stale = {(rows[s.prompt], s.sample) for s in batch.samples if s.version < step}
        assert batch.stats.stale == len(stale)
        assert stale >= partials & {(rows[s.prompt], s.sample) for s in batch.samples}
        assert len(batch.baselines) == (4 if greedy else 0)
        assert len(rows) == len(set(rows))
        assert not set(seen) & set(rows)
        seen += rows
        waiting = source.buffer.queued
        assert batch.stats.aborted == (sum(len(group.partial) for group in waiting) if batch.stats.rounds else 0)
        assert len(source.buffer.groups) <= np.ceil(4 * oversample) - 4
        if resumed:
            plain, shards = groups_to_json(source.buffer.groups)
            source.buffer.restore(groups_from_json(json.loads(json.dumps(plain)), shards))
    # Nothing that was drawn from the data is lost: it was trained on, or it waits.
    waiting_rows = [
        group.prompt_index
        if not group.is_complete
        else int(group.shards[int(group.samples.shard[0])].row(int(group.samples.row[0])).tokens[0])
        for group in source.buffer.groups
    ]
    assert sorted(seen + waiting_rows) == list(range(source.cursor.position))


def test_dropped_groups_are_refilled_from_what_was_broken_off() -> None:
    workers = Workers([Engine(6), Engine(6)])
    source = source_of(workers, oversample=1.5, keep="accuracy", low=4.0, high=100.0, max_batches=20)
    for step in (1, 2, 3):
        workers.load(step)
        batch = source.take(step)
        check(batch, step)
        means = batch.samples.score.reshape(4, SAMPLES).mean(1)
        assert (means >= 4.0).all()


def test_without_oversampling_a_round_finishes_all_and_counts_nothing() -> None:
    workers = Workers([Engine(4), Engine(4)], same_bits=True)
    source = source_of(workers, oversample=1.0)
    workers.load(1)
    batch = source.take(1)
    assert check(batch, 1) == [0, 1, 2, 3]
    assert (workers.queue, source.buffer.groups) == (None, [])
    assert (batch.stats.aborted, batch.stats.resumed, batch.stats.stale) == (0, 0, 0)


def test_tokens_that_were_drawn_before_are_not_counted_again() -> None:
    workers = Workers([Engine(6)])
    source = source_of(workers, oversample=2.0)
    generated = trained = 0
    for step in (1, 2, 3, 4):
        workers.load(step)
        batch = source.take(step)
        generated += batch.stats.generated_tokens
        trained += int(batch.samples.response_tokens.sum())
    waiting = sum(int(group.samples.response_tokens.sum()) for group in source.buffer.groups)
    waiting += sum(partial.tokens for group in source.buffer.groups for partial in group.partial)
    assert generated == trained + waiting


def test_groups_that_none_has_begun_are_no_part_of_what_was_broken_off() -> None:
    workers = Workers([Engine(2)])
    source = source_of(workers, oversample=4.0)
    workers.load(1)
    source.take(1)
    untouched = [group for group in source.buffer.queued if not len(group.samples) and not group.partial]
    assert untouched
    assert all(group.shards == [] or group.shards == () for group in untouched)


@pytest.mark.parametrize("engines", [1, 2])
def test_a_queue_needs_no_more_responses_than_slots_at_once(engines: int) -> None:
    workers = Workers([Engine(6) for _ in range(engines)])
    source = source_of(workers, oversample=3.0)
    for step in (1, 2):
        workers.load(step)
        source.take(step)
    assert max(engine.max_unfinished for engine in workers.engines) < 6 + SAMPLES
