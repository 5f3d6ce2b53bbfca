"""Prompts in, verified samples out: shared by training and evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlcli.data.prompts import TokenizedPrompts
from rlcli.types import Sample
from rlcli.workers.group import WorkerGroup
from rlcli.workers.rollout_role import RolloutCall
from rlcli.workers.work import Progress, PromptTask

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Collected:
    """samples: ordered by prompt, then sample, whoever generated them. shards: by worker rank, references to their
    tokens. generate_s: of the slowest worker; verify_s: its wait for verdicts after generation had ended."""

    samples: list[Sample]
    shards: list[Any]
    generate_s: float
    verify_s: float


def collect(
    workers: WorkerGroup,
    prompts: TokenizedPrompts,
    indexes: Sequence[int],
    samples_per_prompt: int,
    call: RolloutCall,
    *,
    tensor_parallel: int = 1,
    on_progress: OnProgress = lambda done, total: None,
) -> Collected:
    """Generate `samples_per_prompt` responses to each of `prompts[indexes]` and verify them.

    Prompts are dealt to the engines in turn; workers that share an engine get the same ones. `Sample.prompt` is the
    position in `indexes`.
    """
    drawn: Counter[int] = Counter()
    tasks = []
    for position, index in enumerate(indexes):
        first = drawn[index] * samples_per_prompt
        tasks.append(PromptTask(position, prompts.tokens(index), prompts.prompts[index], samples_per_prompt, first))
        drawn[index] += 1
    engines = len(workers) // tensor_parallel
    per_rank = [tasks[rank // tensor_parallel :: engines] for rank in range(len(workers))]
    reports, done, total = [], 0, len(tasks) * samples_per_prompt
    for item in workers.rollout(per_rank, [call] * len(workers)):
        if isinstance(item, Progress):
            done += item.finished
            on_progress(done, total)
        else:
            reports.append(item)
    samples = sorted((s for report in reports for s in report.samples), key=lambda s: (s.prompt, s.sample))
    assert len(samples) == total, f"{len(samples)} samples came back, {total} were asked for"
    shards: list[Any] = [None] * len(workers)
    for report in reports:
        shards[report.rank] = report.shard
    slowest = max(reports, key=lambda report: report.generate_s + report.verify_s)
    return Collected(samples, shards, slowest.generate_s, slowest.verify_s)
