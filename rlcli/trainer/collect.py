"""Prompts in, verified samples out: shared by training and evaluation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcli.data.prompts import TokenizedPrompts
from rlcli.types import Verdict
from rlcli.workers.group import WorkerGroup
from rlcli.workers.rollout_role import RolloutCall
from rlcli.workers.samples import Samples
from rlcli.workers.work import Progress, PromptTask, RolloutReport

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Collected:
    """Verified samples, and how they came about.

    samples: ordered by prompt, then sample, whoever generated them. shards: references to their tokens, as
    `Sample.shard` counts them. generate_s: of the slowest worker; verify_s: its wait for verdicts after generation had
    ended; both summed over rounds. baselines: prompt → verdict on the greedy response to it, where one was asked for.

    Of a step with dynamic sampling, where the samples are not all that was generated, nor all generated now:
    rounds: of generation. generated: samples of this step in all, dropped ones and those that wait included;
    generated_score, generated_tokens: their mean score (0 where none) and their response tokens. dropped: groups
    judged not worth training on. kept_over: good groups that wait for the next step. stale: samples in this batch that
    waited, and so are of an older policy.

    part_weights: of the named parts of the reward, where the advantage reads them.
    """

    samples: Samples
    shards: list[Any]
    generate_s: float
    verify_s: float
    baselines: dict[int, Verdict] = field(default_factory=dict)
    rounds: int = 0
    generated: int = 0
    generated_score: float = 0.0
    generated_tokens: int = 0
    dropped: int = 0
    kept_over: int = 0
    stale: int = 0
    part_weights: Mapping[str, float] = field(default_factory=dict)


def collect(
    workers: WorkerGroup,
    prompts: TokenizedPrompts,
    indexes: Sequence[int],
    samples_per_prompt: int,
    call: RolloutCall,
    *,
    tensor_parallel: int = 1,
    greedy: bool = False,
    drawn: Counter[int] | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> Collected:
    """Generate `samples_per_prompt` responses to each of `prompts[indexes]` and verify them; with `greedy` one greedy
    response besides, whose score is the prompt's baseline.

    Prompts are dealt to the engines in turn; workers that share an engine get the same ones. `Sample.prompt` is the
    position in `indexes`, `Sample.shard` the worker's rank. drawn: how often each index was drawn for the same purpose
    and step before, which is counted on: each time gives other responses.
    """
    tasks = _tasks(prompts, indexes, samples_per_prompt, greedy, Counter() if drawn is None else drawn)
    reports = gather(workers, tasks, call, tensor_parallel=tensor_parallel, on_progress=on_progress)
    samples = Samples.joined([report.samples for report in reports]).sorted()
    baselines = {prompt: verdict for report in reports for prompt, verdict in report.baselines.items()}
    shards = [shard for (shard,) in workers.take_shard()]
    slowest = max(reports, key=lambda report: report.generate_s + report.verify_s)
    return Collected(
        samples,
        shards,
        slowest.generate_s,
        slowest.verify_s,
        baselines,
        rounds=1,
        generated=len(samples),
        generated_score=math.fsum(samples.score) / max(len(samples), 1),
        generated_tokens=int(samples.response_tokens.sum()),
    )


def gather(
    workers: WorkerGroup,
    tasks: Sequence[PromptTask],
    call: RolloutCall,
    *,
    tensor_parallel: int = 1,
    on_progress: OnProgress = lambda done, total: None,
) -> list[RolloutReport]:
    """Deal the tasks to the engines in turn, and wait for the report of every worker."""
    engines = len(workers) // tensor_parallel
    per_rank = [list(tasks[rank // tensor_parallel :: engines]) for rank in range(len(workers))]
    reports: list[RolloutReport] = []
    done, total = 0, sum(task.responses for task in tasks)
    for item in workers.rollout(per_rank, [call] * len(workers)):
        if isinstance(item, Progress):
            done += item.finished
            on_progress(done, total)
        else:
            reports.append(item)
    came = sum(len(report.samples) + len(report.baselines) for report in reports)
    assert came == total, f"of {total} responses {came} came back"
    return reports


def _tasks(
    prompts: TokenizedPrompts, indexes: Sequence[int], samples: int, greedy: bool, drawn: Counter[int]
) -> list[PromptTask]:
    tasks = []
    for position, index in enumerate(indexes):
        first = drawn[index] * samples
        tasks.append(PromptTask(position, prompts.tokens(index), prompts.prompts[index], samples, first, greedy))
        drawn[index] += 1
    return tasks
