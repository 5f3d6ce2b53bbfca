"""Records of each step for viewers, from the controller: advantages, the timeline and the outcome of each prompt.
Written in the background.

`recording` chooses the samples whose tokens the workers record. The rule: groups whose rewards differ come first, then
the others, both in the order of the step; of each group its best and its worst sample by shaped reward, one if all are
equal; `tracking.token_samples` in all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from rlcli.cluster.process.busy_lanes import SHORTEST_S
from rlcli.config.schema import RunConfig
from rlcli.data.messages import RolloutBatch
from rlcli.data.sample_files import write_table
from rlcli.data.step_files import ADVANTAGES, RecordedSample, Recording, advantages_table, tokens_path
from rlcli.rollout.scheduler.sample_filter import REASONS
from rlcli.runs.folder import PROMPTS, TIMELINE, RunFolder, append_line
from rlcli.support.background_writer import BackgroundWriter
from rlcli.training.loop.batch_selection import SelectedSamples
from rlcli.training.worker.rank_step_recorder import StepReport

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64

CONTROLLER = "controller"
MOST_LANES = 32
"""Maximum number of ranks of each group of workers in the timeline."""
NOT_SELECTED = "not_selected"
"""In place of a reason for a sample that counts but that the algorithm's selection leaves out."""

Lane = list[tuple[str, float, float]]
"""Spans: name, begin and end, in seconds since 1970."""


class StepRecords:
    """Records the steps of one run. note: receives one note if something cannot be written.

    records.begin()
    records.phase("generate")      # ends the phase before
    work = records.recording(step, batch, selected)   # sent to the workers with their rows
    records.trained(step, batch, selected, reports)   # their reports
    records.end(step)
    records.flush()                # before a checkpoint is committed
    """

    def __init__(self, folder: RunFolder, config: RunConfig, note: Callable[[str], None]) -> None:
        self._path, self._samples, self._config, self._note = folder.path, folder.samples, config, note
        self._saves = config.tracking.save_samples and not config.data.response
        self._writer = BackgroundWriter("records of steps")
        self._noted = False
        self._start = 0.0
        self._phase: tuple[str, float] = ("", 0.0)
        self._lanes: dict[str, Lane] = {}

    def begin(self) -> None:
        """A step begins."""
        self._start, self._phase, self._lanes = time.time(), ("", 0.0), {}

    def phase(self, name: str) -> None:
        """The controller begins a phase, which ends the last one; "": it begins none."""
        (last, start), now = self._phase, time.time()
        if last and now - start >= SHORTEST_S:
            self._lanes.setdefault(CONTROLLER, []).append((last, start, now))
        self._phase = name, now

    def recording(self, step: int, batch: RolloutBatch, selected: SelectedSamples) -> Recording | None:
        """The samples whose tokens the workers record in this step; None if there are none."""
        if not self._saves:
            return None
        samples = [
            RecordedSample(
                index,
                _prompt_id(batch, int(selected.samples.prompt[index])),
                int(selected.samples.saved_step[index]),
                int(selected.samples.saved_group[index]),
                int(selected.samples.sample[index]),
                forwarded=selected.active is None or selected.active[index],
            )
            for index in best_and_worst(selected, self._config.tracking.token_samples)
        ]
        return Recording(step, tokens_path(self._samples, step), self._config.model.path, samples)

    def trained(
        self, step: int, batch: RolloutBatch, selected: SelectedSamples, reports: Mapping[str, Sequence[StepReport]]
    ) -> None:
        """Record the step after its updates. reports: of each group's ranks, by the name of their lanes."""
        self.add_spans({name: [report.spans for report in ranks] for name, ranks in reports.items()})
        flat = [report for ranks in reports.values() for report in ranks]
        for report in flat:
            self._report(report.problem)
        if batch.scored_groups:
            line = json.dumps({"step": step, "groups": batch.scored_groups}, ensure_ascii=False)
            self._writer.put(partial(append_line, self._path / PROMPTS, line))
        if self._saves:
            means = {index: value for report in flat for index, value in report.advantages.items()}
            path = self._samples / f"step-{step:06d}" / ADVANTAGES
            self._writer.put(partial(_write_advantages, path, step, batch, selected, means))

    def add_spans(self, spans: Mapping[str, Iterable[Sequence[tuple[str, float, float]]]]) -> None:
        """Add the calls of each group's ranks."""
        for name, ranks in spans.items():
            for rank, calls in list(enumerate(ranks))[:MOST_LANES]:
                self._lanes.setdefault(f"{name} {rank}", []).extend(calls)

    def end(self, step: int) -> None:
        """The step has ended, with its checkpoint and its evaluation: write its timeline."""
        self.phase("")
        line = {"step": step, "start": round(self._start, 4), "lanes": lanes_since(self._start, self._lanes)}
        self._writer.put(partial(append_line, self._path / TIMELINE, json.dumps(line)))
        self._report(self._writer.problem())

    def flush(self) -> None:
        """Wait until everything is written."""
        self._writer.flush()
        self._report(self._writer.problem())

    def _report(self, problem: str) -> None:
        """Print the first problem of the run only."""
        if problem and not self._noted:
            self._noted = True
            self._note(f"{problem}; the run continues without them")


def best_and_worst(selected: SelectedSamples, count: int) -> list[int]:
    """Indexes of at most `count` of the selected samples, by the rule above."""
    if not count:
        return []
    rewards, groups = selected.columns.rewards.tolist(), dict[int, list[int]]()
    seen = set[int]()
    for index, (group, sample) in enumerate(zip(selected.groups, selected.indexes.tolist(), strict=True)):
        if sample not in seen:  # a selection may repeat a sample
            seen.add(sample)
            groups.setdefault(group, []).append(index)
    differing, equal = [], []
    for indexes in groups.values():
        best, worst = max(indexes, key=rewards.__getitem__), min(indexes, key=rewards.__getitem__)
        if rewards[best] > rewards[worst]:
            differing += [best, worst]
        else:
            equal.append(best)
    return [*differing, *equal][:count]


class TimelineLane(TypedDict):
    """A lane of timeline.jsonl."""

    name: str
    """Its process, such as `worker 0`."""
    spans: list[list[str | float]]
    """Activities of the process: label, begin and end, in seconds."""


def lanes_since(start: float, lanes: Mapping[str, Lane]) -> list[TimelineLane]:
    """Lanes as in timeline.jsonl, in seconds since `start`; what ended before is left out.

    >>> lanes_since(100.0, {"worker 0": [("sync", 90.0, 91.0), ("load", 99.5, 101.0), ("update", 101.0, 102.25)]})
    [{'name': 'worker 0', 'spans': [['load', 0.0, 1.0], ['update', 1.0, 2.25]]}]
    """
    return [
        {
            "name": name,
            "spans": [
                [label, round(max(0.0, begin - start), 4), round(end - start, 4)]
                for label, begin, end in sorted(spans, key=lambda span: span[1])
                if end > start
            ],
        }
        for name, spans in lanes.items()
    ]


def _prompt_id(batch: RolloutBatch, group: int) -> str:
    """Empty if a batch of an older checkpoint does not have it."""
    return batch.prompt_ids[group] if batch.prompt_ids else ""


def _write_advantages(
    path: Path, step: int, batch: RolloutBatch, selected: SelectedSamples, means: Mapping[int, float]
) -> None:
    samples, trained = batch.samples, set(selected.indexes.tolist())
    reasons = [
        REASONS[reason - 1] if reason else None if index in trained else NOT_SELECTED
        for index, reason in enumerate(selected.exclusion_reasons.tolist())
    ]
    table = advantages_table(
        step,
        [_prompt_id(batch, group) for group in samples.prompt.tolist()],
        samples.saved_step,
        samples.saved_group,
        samples.sample,
        step_advantages(selected, means),
        selected.shaped_rewards,
        reasons,
    )
    write_table(path, table)


def step_advantages(selected: SelectedSamples, means: Mapping[int, float]) -> Float64[np.ndarray, " S"]:
    """The advantage of each sample of the step; NaN if it is not trained on. means: by index, of samples whose tokens'
    advantages differ; a sample that no rank forwards has 0 for all tokens."""
    import numpy as np

    known = selected.columns.get("advantages")
    if known is None or known.ndim > 1:
        values = np.full(len(selected.samples), np.nan)
        if known is not None:
            values[~known.any(axis=1)] = 0.0
        values[list(means)] = list(means.values())
    else:
        values = known.astype(np.float64)
    advantages: np.ndarray = np.full(len(selected.shaped_rewards), np.nan)
    advantages[selected.indexes] = values
    return advantages
