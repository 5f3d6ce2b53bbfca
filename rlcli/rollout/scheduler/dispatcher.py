"""Generate and verify samples for prompts, on all engines: shared by training and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from uuid import uuid4

from rlcli.data.columns import SampleTable
from rlcli.data.messages import PromptTask, RolloutBatch
from rlcli.data.rollout_stats import RolloutStats
from rlcli.rollout.rollout_arguments import RolloutArguments, progress_every
from rlcli.rollout.worker.work_queue import RoundTasks
from rlcli.rollout.worker_calls import RolloutCalls, RolloutWorkers

OnProgress = Callable[[int, int], None]


def collect(workers: RolloutWorkers, reports: Sequence[RolloutBatch]) -> RolloutBatch:
    """Merge the workers' reports of a round, and fetch references to their shards. `Sample.prompt` is the task's
    number, `Sample.shard` the worker's rank. A round that ended early may have more groups than `until`, and aborted
    responses."""
    samples = SampleTable.joined([report.samples for report in reports]).sorted()
    partial = [rollout for report in reports for rollout in report.partial]
    shards = [shard for (shard,) in workers.call(RolloutCalls.take_shard)] if len(samples) or partial else []
    stats = RolloutStats.of_round([report.stats for report in reports])
    return RolloutBatch(
        samples,
        shards,
        replace(stats, generated=len(samples), aborted=len(partial)),
        baselines={prompt: verdict for report in reports for prompt, verdict in report.baselines.items()},
        partial=partial,
    )


def gather(
    workers: RolloutWorkers,
    tasks: Sequence[PromptTask],
    arguments: RolloutArguments,
    *,
    tensor_parallel: int = 1,
    slots: int | None = None,
    until: int | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> list[RolloutBatch]:
    """Run the tasks on the engines, and wait for the report of every worker. One engine generates a whole group.

    until: the round ends once this many groups are finished and verified, and aborts the others; None: finish all.
    slots: of each engine. Tasks beyond all engines' slots are assigned as slots become free. With None, or if
    `workers.same_bits` promises the same bits in every run, each engine gets its whole share at once.
    """
    free = slots if until is not None or not workers.same_bits else None
    shares, unassigned = assign(tasks, len(workers) // tensor_parallel, arguments.sampling.max_tokens, free)
    queue = None if until is None and not unassigned else RoundTasks(uuid4().hex, unassigned, until)
    sizes = sorted(task.responses for task in tasks)
    done, total = 0, sum(sizes[:until])

    def finished(count: int) -> None:
        nonlocal done
        done += count
        on_progress(min(done, total), total)

    reports = run_shares(workers, shares, arguments, finished, tensor_parallel=tensor_parallel, queue=queue)
    responses = sum(len(report.samples) + len(report.baselines) for report in reports)
    assert responses == total or until is not None, f"{responses} of {total} responses were returned"
    return reports


def run_shares(
    workers: RolloutWorkers,
    shares: Sequence[Sequence[PromptTask]],
    arguments: RolloutArguments,
    on_finished: Callable[[int], None],
    *,
    tensor_parallel: int = 1,
    queue: RoundTasks | None = None,
) -> list[RolloutBatch]:
    """Call every worker with the tasks of its engine, and wait for their reports. on_finished: called with the number
    of responses that have finished since its last call."""
    per_rank = [shares[rank // tensor_parallel] for rank in range(len(workers))]
    arguments = replace(arguments, progress_s=progress_every(len(workers)))
    reports: list[RolloutBatch] = []
    for item in workers.call(RolloutCalls.rollout, per_rank, arguments, queue):
        if isinstance(item, RolloutBatch):
            reports.append(item)
        else:
            on_finished(item.finished)
    return reports


def assign(
    tasks: Sequence[PromptTask], engines: int, limit: int, slots: int | None = None
) -> tuple[list[list[PromptTask]], list[PromptTask]]:
    """Assign tasks to engines; returns the tasks of each engine, and those that remain once no engine has free slots.

    Oldest step first, started or not, to prevent starvation: rounds that end early never reach the last tasks. Within a
    step, aborted groups come first, then the largest, by their tokens if each response has `limit` tokens. Each goes to
    the engine with the least work; ties are assigned round-robin.
    """
    loads = [(task.load(limit), task) for task in tasks]
    loads.sort(key=lambda pair: (math.inf if pair[1].step is None else pair[1].step, not pair[1].partial, -pair[0]))
    shares: list[list[PromptTask]] = [[] for _ in range(engines)]
    free_engines = [(0, engine, 0) for engine in range(engines)]  # heap of (work, engine, slots in use)
    unassigned = []
    for load, task in loads:
        if not free_engines:
            unassigned.append(task)
            continue
        work, engine, used = heappop(free_engines)
        shares[engine].append(task)
        used += task.responses
        if slots is None or used < slots:
            heappush(free_engines, (work + load, engine, used))
    return shares, unassigned
