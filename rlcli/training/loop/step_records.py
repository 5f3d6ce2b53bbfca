"""What the controller records of each step for viewers: advantages, the timeline and what became of each prompt.
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
from typing import TYPE_CHECKING, Any

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

CONTROLLER = "controller"
MOST_LANES = 32
"""Ranks of each group of workers that the timeline shows, the first ones."""
NOT_SELECTED = "not_selected"
"""In place of a reason for a sample that counts but that the algorithm's selection leaves out."""

Lane = list[tuple[str, float, float]]
"""Spans: name, begin and end, in seconds since 1970."""


class StepRecords:
    """Records the steps of one run. note: receives one note if something cannot be written.

    records.begin()
    records.phase("generate")      # ends the phase before
    work = records.recording(step, batch, chosen)     # sent to the workers with their rows
    records.trained(step, batch, chosen, reports)     # what they report
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
        (last, since), now = self._phase, time.time()
        if last and now - since >= SHORTEST_S:
            self._lanes.setdefault(CONTROLLER, []).append((last, since, now))
        self._phase = name, now

    def recording(self, step: int, batch: RolloutBatch, chosen: SelectedSamples) -> Recording | None:
        """What the workers record of this step; None if nothing is."""
        if not self._saves:
            return None
        samples = [
            RecordedSample(
                place,
                _prompt_id(batch, int(chosen.samples.prompt[place])),
                int(chosen.samples.saved_step[place]),
                int(chosen.samples.saved_group[place]),
                int(chosen.samples.sample[place]),
                forwarded=chosen.active is None or chosen.active[place],
            )
            for place in best_and_worst(chosen, self._config.tracking.token_samples)
        ]
        return Recording(step, tokens_path(self._samples, step), self._config.model.path, samples)

    def trained(
        self, step: int, batch: RolloutBatch, chosen: SelectedSamples, reports: Mapping[str, Sequence[StepReport]]
    ) -> None:
        """The step's updates are done. reports: of each group's ranks, by the name of their lanes."""
        self.add_spans({name: [report.spans for report in ranks] for name, ranks in reports.items()})
        flat = [report for ranks in reports.values() for report in ranks]
        for report in flat:
            self._report(report.problem)
        if batch.judged:
            line = json.dumps({"step": step, "groups": batch.judged}, ensure_ascii=False)
            self._writer.put(partial(append_line, self._path / PROMPTS, line))
        if self._saves:
            means = {place: value for report in flat for place, value in report.advantages.items()}
            path = self._samples / f"step-{step:06d}" / ADVANTAGES
            self._writer.put(partial(_write_advantages, path, step, batch, chosen, means))

    def add_spans(self, spans: Mapping[str, Iterable[Sequence[tuple[str, float, float]]]]) -> None:
        """Add the calls of each group's ranks."""
        for name, ranks in spans.items():
            for rank, own in list(enumerate(ranks))[:MOST_LANES]:
                self._lanes.setdefault(f"{name} {rank}", []).extend(own)

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
        """Note the first problem of the run: more of them would fill the screen."""
        if problem and not self._noted:
            self._noted = True
            self._note(f"{problem}; the run goes on without them")


def best_and_worst(chosen: SelectedSamples, count: int) -> list[int]:
    """Places of at most `count` of the selected samples, by the rule above."""
    if not count:
        return []
    rewards, groups = chosen.columns.rewards.tolist(), dict[int, list[int]]()
    seen = set[int]()
    for place, (group, sample) in enumerate(zip(chosen.groups, chosen.places.tolist(), strict=True)):
        if sample not in seen:  # a selection may repeat a sample
            seen.add(sample)
            groups.setdefault(group, []).append(place)
    differing, equal = [], []
    for places in groups.values():
        best, worst = max(places, key=rewards.__getitem__), min(places, key=rewards.__getitem__)
        if rewards[best] > rewards[worst]:
            differing += [best, worst]
        else:
            equal.append(best)
    return [*differing, *equal][:count]


def lanes_since(start: float, lanes: Mapping[str, Lane]) -> list[dict[str, Any]]:
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
    path: Path, step: int, batch: RolloutBatch, chosen: SelectedSamples, means: Mapping[int, float]
) -> None:
    samples, trained = batch.samples, set(chosen.places.tolist())
    reasons = [
        REASONS[reason - 1] if reason else None if place in trained else NOT_SELECTED
        for place, reason in enumerate(chosen.left_out.tolist())
    ]
    table = advantages_table(
        step,
        [_prompt_id(batch, group) for group in samples.prompt.tolist()],
        samples.saved_step,
        samples.saved_group,
        samples.sample,
        step_advantages(chosen, means),
        chosen.shaped,
        reasons,
    )
    write_table(path, table)


def step_advantages(chosen: SelectedSamples, means: Mapping[int, float]) -> np.ndarray:
    """The advantage of each sample of the step, float64; NaN if it is not trained on. means: by place, of samples whose
    tokens' advantages differ; what no rank forwards has 0 everywhere."""
    import numpy as np

    known = chosen.columns.get("advantages")
    if known is None or known.ndim > 1:
        own = np.full(len(chosen.samples), np.nan)
        if known is not None:
            own[~known.any(axis=1)] = 0.0
        own[list(means)] = list(means.values())
    else:
        own = known.astype(np.float64)
    found: np.ndarray = np.full(len(chosen.shaped), np.nan)
    found[chosen.places] = own
    return found
