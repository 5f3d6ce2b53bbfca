"""Simulated ranks: they answer as workers do, with reports of the right shape, and neither generate nor train.

Two ways to them. `loopback` serialises what crosses in this process, so that nothing but the driver's own Python and
its bytes are measured. `ray` has real actors, few processes that each answer for many ranks, called through the real
`WorkerGroup`: that adds what Ray's client costs the driver.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlcli.algorithms.correction.log_prob_check import LogProbComparison, sample_table
from rlcli.cluster.dispatch import per_rank, sum_by_key
from rlcli.cluster.worker_group import WorkerGroup
from rlcli.data.columns import OUTCOMES, SampleTable
from rlcli.data.messages import Progress, PromptTask, RolloutBatch
from rlcli.data.rollout_stats import RolloutStats
from rlcli.rollout.worker.work_queue import RoundTasks
from rlcli.training.worker.calls import WorkerCalls, Workers
from rlcli.training.worker.rank_step_recorder import StepReport
from rlcli.training.worker.weight_sync.weight_transfer import Synced
from rlcli.types import Outcome

ALIKE = sample_table(np.full(5, -1.0), np.full(5, -1.0), np.array([5]), sampled=True)
"""A sample of which engine and trainer find the same log-probs."""
SUMS = ("tokens", "policy_loss", "clip_low_tokens", "clip_high_tokens", "ratio_abs_dev", "kl", "entropy", "grad_norm")


class FakeRank:
    """Answers of rank `rank` of `ranks`. length: mean response tokens. progress: number of progress reports
    in a step. Methods not listed here return zeros or empty values."""

    def __init__(self, rank: int, ranks: int, length: int, progress: int) -> None:
        self.rank, self.ranks, self.length, self.progress = rank, ranks, length, progress
        self.tokens: list[float] = []
        self.reports = self.loaded = 0

    def answer(self, name: str, *args: Any) -> Any:
        if name == "load":
            bins, step = args
            minibatches = [[sample for bin in micros for sample in bin] for micros in bins]
            self.loaded = sum(map(len, minibatches))
            self.tokens = [float(step.columns.lengths[samples].sum()) for samples in minibatches]
        if name == "update":
            return dict.fromkeys(SUMS, 1.0) | {"tokens": self.tokens[args[0]], "compared_tokens": 5.0 * self.loaded}
        if name == "take_shard":
            return [self.shard()]
        if name == "sync_weights":
            return Synced(0.0, 0, 1.0, 0, 0, 0.0, 0)
        if name == "recent_rows":
            return [(np.arange(6, dtype=np.int32), 2)] * 16
        if name == "trainer_log_probs":
            return [np.full(4, -1.0)] * len(args[0])
        if name == "step_report":
            return StepReport({}, (), compared=LogProbComparison.of(np.repeat(ALIKE, self.loaded, axis=0)))
        kind = str(getattr(WorkerCalls, name).__annotations__["return"]).partition("[")[0]
        return {"dict": {}, "list": []}.get(kind)

    def shard(self) -> Any:
        """Stand-in for a reference to the tokens."""
        return FakeShard(self.rank)

    def stream(
        self, name: str, tasks: Sequence[PromptTask], call: Any, queue: RoundTasks | None = None
    ) -> Iterator[Any]:
        """Unassigned groups are taken by the ranks in turn."""
        assert name == "rollout", name
        report = self.report([*tasks, *(queue.tasks[self.rank :: self.ranks] if queue else ())])
        for _ in range(self.progress):
            yield Progress(len(report.samples) // self.progress)
        yield Progress(len(report.samples) % self.progress)
        yield report

    def report(self, tasks: Sequence[PromptTask]) -> RolloutBatch:
        self.reports += 1
        draw = np.random.default_rng([self.rank, self.length])
        counts = [task.samples for task in tasks]
        n = sum(counts)
        prompt: np.ndarray = np.repeat(np.array([task.group for task in tasks], np.int64), counts)
        ones: np.ndarray = np.ones(n, np.int64)
        right = draw.random(n) < 0.4
        lengths = np.minimum(draw.lognormal(np.log(self.length) - 0.32, 0.8, n).astype(np.int64) + 1, 4 * self.length)
        answers: np.ndarray = np.array([str(number) for number in draw.integers(0, 10**6, n)], object)
        samples = SampleTable(
            prompt=prompt,
            sample=np.concatenate([np.arange(count) for count in counts]) if counts else ones,
            **dict.fromkeys(("ended", "tool_calls", "failed_calls"), 0 * ones),
            branches=ones,
            shard=self.rank * ones,
            row=np.arange(n),
            prompt_tokens=np.repeat(np.array([len(task.tokens) for task in tasks], np.int64), counts),
            response_tokens=lengths,
            version=ones,
            seed=np.arange(n) + (self.reports << 40) + (self.rank << 20),
            signature=0 * ones,
            context_tokens=0 * ones,
            turns=ones,
            newer_by=0 * ones,
            saved_step=0 * ones,
            saved_group=prompt,
            turn_rewards=np.zeros((n, 0)),
            turn_states=np.zeros((n, 0), np.int64),
            version_tokens=np.zeros((n, 0), np.int64),
            truncated=lengths == 4 * self.length,
            score=right.astype(np.float64),
            latency_s=draw.random(n),
            outcome=np.where(right, OUTCOMES.index(Outcome.OK), OUTCOMES.index(Outcome.WRONG)).astype(np.int8),
            answer=answers,
            detail=np.array([""] * n, object),
            parts={"format": draw.random(n).round(1), "math": right.astype(np.float64)},
        )
        stats = RolloutStats(generated_tokens=int(lengths.sum()), version=1, generate_s=1.0, verify_s=0.1)
        return RolloutBatch(samples, stats=stats)


@dataclass(frozen=True)
class FakeShard:
    rank: int


@dataclass
class Account:
    """Cost of a step."""

    outside: float = 0.0
    """CPU seconds of this process outside the controller: the work of fake ranks in loopback."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of arguments by method."""
    received: Counter[str] = field(default_factory=Counter)
    """Bytes of results by method."""
    calls: int = 0
    """Number of actor calls."""

    def clear(self) -> None:
        self.outside, self.calls = 0.0, 0
        self.sent.clear()
        self.received.clear()


class Loopback(WorkerGroup[WorkerCalls]):
    """Fake ranks in this process; arguments and results are serialised as Ray would, once a rank, and once for all
    ranks where they are shared."""

    def __init__(self, fakes: Sequence[FakeRank]) -> None:
        super().__init__(list(fakes), Path("/nonexistent"), None)
        self.account = Account()

    @property
    def _data_ranks(self) -> list[int]:
        """Each fake has its own rows."""
        return list(range(len(self)))

    def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        account, name, dispatch = self.account, method.__name__, method.dispatch
        args, _ = dispatch.stored(args, kwargs, Stored)
        account.sent[name] += sum(_size(arg.value) for arg in args if isinstance(arg, Stored))
        args_by_rank = []
        for rank_args in per_rank(dispatch, args, len(self), self._data_ranks):
            data = pickle.dumps(tuple(arg for arg in rank_args if not isinstance(arg, Stored)))
            account.sent[name] += len(data)
            account.calls += 1
            args_by_rank.append(tuple(arg.value if isinstance(arg, Stored) else arg for arg in rank_args))
        if dispatch.collect == "stream":
            return self._streamed(name, args_by_rank)
        called = zip(self._actors[: len(args_by_rank)], args_by_rank, strict=True)
        answers = [partial(fake.answer, name, *rank_args) for fake, rank_args in called]
        results = [self._back(name, answer) for answer in answers]
        return (
            results[0] if dispatch.collect == "first" else sum_by_key(results) if dispatch.collect == "sum" else results
        )

    def _streamed(self, name: str, args_by_rank: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        for fake, rank_args in zip(self._actors, args_by_rank, strict=True):
            items = fake.stream(name, *rank_args)
            while (item := self._back(name, partial(next, items, None))) is not None:
                yield item

    def _back(self, name: str, answer: Any) -> Any:
        """The answer of a fake, serialised outside the account and deserialised within it."""
        started = time.process_time()
        data = pickle.dumps(answer())
        self.account.outside += time.process_time() - started
        self.account.received[name] += len(data)
        return pickle.loads(data)


@dataclass(frozen=True)
class Stored:
    """An argument that all ranks share."""

    value: Any


def _size(value: Any) -> int:
    return len(pickle.dumps(value))


class Host:
    """An actor that answers for the ranks `first`, `first` + 1, …"""

    def __init__(self, fakes: Sequence[FakeRank]) -> None:
        self.fakes = {fake.rank: fake for fake in fakes}

    def call(self, rank: int, name: str, *args: Any) -> Any:
        if name == "take_shard":
            import ray

            return [ray.put(FakeShard(rank))]
        return self.fakes[rank].answer(name, *args)

    def stream(self, rank: int, name: str, *args: Any) -> Iterator[Any]:
        yield from self.fakes[rank].stream(name, *args)


@dataclass(frozen=True)
class Rank:
    """One rank of a host, called as an actor is."""

    host: Any
    rank: int

    def __getattr__(self, name: str) -> Method:
        return Method(self.host, self.rank, name)


@dataclass(frozen=True)
class Method:
    host: Any
    """Actor that holds the rank."""
    rank: int
    """Rank within all hosts."""
    name: str
    """Name of the method."""
    streaming: bool = False
    """Return an object-ref generator."""

    def options(self, num_returns: str) -> Method:
        return Method(self.host, self.rank, self.name, num_returns == "streaming")

    def remote(self, *args: Any) -> Any:
        if self.streaming:
            return self.host.stream.options(num_returns="streaming").remote(self.rank, self.name, *args)
        return self.host.call.remote(self.rank, self.name, *args)


def over_ray(fakes: Sequence[FakeRank], hosts: int, logs: Path) -> Workers:
    """The same ranks behind real actors, in `hosts` processes."""
    import ray

    remote: Any = ray.remote(num_cpus=0)(Host)
    actors = [remote.remote(fakes[number::hosts]) for number in range(hosts)]
    return WorkerGroup([Rank(actors[fake.rank % hosts], fake.rank) for fake in fakes], logs, None)
