"""Records of a step that the controller writes for viewers, and when it drops them rather than slow the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rlcli.algorithms.build import build_algorithm
from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.data.messages import RolloutBatch
from rlcli.runs.folder import RunFolder
from rlcli.runs.record_files import judged_of, timeline_of
from rlcli.training.loop.batch_selection import SelectedSamples, select_batch
from rlcli.training.loop.step_records import StepRecords, best_and_worst, step_advantages
from rlcli.training.worker.rank_step_recorder import StepReport
from rlcli.types import Outcome, Sample, Verdict

SCORES = ((1.0, 1.0), (0.0, 1.0), (0.5, None), (0.0, 1.0))
"""Of the two samples of each group; None: its verification crashed, so that the other one is alone."""


def batch_of(scores: Sequence[Sequence[float | None]] = SCORES, saved_step: int = 3) -> RolloutBatch:
    """The groups were saved as those from the tenth on, in the files of `saved_step`."""
    samples = [
        Sample(
            prompt=group,
            sample=sample,
            shard=0,
            row=0,
            prompt_tokens=2,
            response_tokens=3,
            stop_reason="stop",
            verdict=Verdict(score or 0.0, Outcome.CRASH if score is None else Outcome.OK),
            version=1,
            saved_step=saved_step,
            saved_group=10 + group,
        )
        for group, of_group in enumerate(scores)
        for sample, score in enumerate(of_group)
    ]
    return RolloutBatch(SampleTable.of(samples), [], prompt_ids=[f"row:{group}" for group in range(len(scores))])


def chosen_of(batch: RolloutBatch, **sections: Any) -> tuple[SelectedSamples, RunConfig]:
    config = RunConfig.model_validate(sections)
    return select_batch(batch, build_algorithm(**config.algorithm.model_dump()), config, 0), config


def test_best_and_worst_of_groups_that_differ_are_recorded_first() -> None:
    selected, _ = chosen_of(batch_of())
    scores = selected.columns.rewards.tolist()
    assert scores == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0], "the third group has lost both"
    assert best_and_worst(selected, 8) == [3, 2, 5, 4, 0]
    assert best_and_worst(selected, 3) == [3, 2, 5]
    assert best_and_worst(selected, 0) == []


def test_a_sample_that_is_trained_on_twice_is_recorded_once() -> None:
    selected, _ = chosen_of(batch_of())
    thrice = replace(selected, groups=[0] * 6, indexes=np.array([0, 1] * 3))
    assert best_and_worst(thrice, 8) == [0]


def test_advantages_name_the_saved_row_and_why_there_is_none(tmp_path: Path) -> None:
    batch = batch_of()
    selected, config = chosen_of(batch, shaping={"overlong_buffer": 2}, rollout={"max_response_tokens": 4})
    folder = RunFolder.create(tmp_path / "run")
    records = StepRecords(folder, config, pytest.fail)
    records.trained(4, batch, selected, {"worker": [StepReport({}, [])]})
    records.flush()
    rows = pq.read_table(folder.samples / "step-000004" / "advantages.parquet").to_pylist()
    assert [(row["prompt_id"], row["group"], row["sample"]) for row in rows] == [
        (f"row:{group}", 10 + group, sample) for group in range(4) for sample in (0, 1)
    ]
    assert {(row["step"], row["saved_step"]) for row in rows} == {(4, 3)}
    assert [row["left_out"] for row in rows] == [None] * 4 + ["alone", "crash"] + [None] * 2
    advantages = [row["advantage"] for row in rows]
    assert advantages[:2] == [0.0, 0.0]
    assert advantages[2] == -advantages[3] < 0
    assert advantages[4:6] == [None, None]
    assert [row["reward"] is None for row in rows] == [False] * 4 + [True] * 2 + [False] * 2
    assert rows[3]["reward"] == 0.5, "with what shaping takes off"


def test_a_sample_that_is_not_selected_has_a_reward_alone(tmp_path: Path) -> None:
    batch = batch_of([(0.0, 0.25, 0.75, 1.0)])
    selected, config = chosen_of(batch, algorithm={"select": "best_worst"})
    assert (len(selected.indexes), set(selected.indexes.tolist())) == (4, {0, 3}), "repeated, and two not at all"
    advantages = step_advantages(selected, {})
    assert np.isnan(advantages).tolist() == [False, True, True, False]
    assert selected.shaped_rewards.tolist() == [0.0, 0.25, 0.75, 1.0]
    recording = StepRecords(RunFolder.create(tmp_path / "run"), config, pytest.fail).recording(1, batch, selected)
    assert recording is not None
    assert [record.sample for record in recording.samples] == [3, 0]


def test_advantages_of_tokens_come_from_the_workers() -> None:
    selected, _ = chosen_of(batch_of(), algorithm={"advantage": "gae"})
    assert not selected.columns.has("advantages")
    advantages = step_advantages(selected, {0: 0.5, 3: -0.25})
    assert advantages[[0, 3]].tolist() == [0.5, -0.25]
    assert np.isnan(advantages[[1, 2, 4, 5, 6]]).all()


def test_nothing_is_recorded_of_a_run_that_saves_no_samples(tmp_path: Path) -> None:
    selected, config = chosen_of(batch_of(), tracking={"save_samples": False})
    folder = RunFolder.create(tmp_path / "run")
    records = StepRecords(folder, config, pytest.fail)
    assert records.recording(1, batch_of(), selected) is None
    records.trained(1, replace(batch_of(), scored_groups=[["a:0", 2, 1, 9, True]]), selected, {})
    records.trained(2, batch_of(), selected, {})
    records.flush()
    assert not any(folder.samples.iterdir())
    assert judged_of(folder.path) == [{"step": 1, "groups": [["a:0", 2, 1, 9, True]]}], "which is no sample"


def test_the_timeline_has_lanes_of_the_controller_and_of_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, now = RunFolder.create(tmp_path / "run"), [100.0]
    monkeypatch.setattr("rlcli.training.loop.step_records.time.time", lambda: now[0])
    records = StepRecords(folder, RunConfig(), pytest.fail)
    records.phase("restore")  # before the step
    records.begin()
    for name, seconds in (("generate", 2.0), ("plan", 0.0001), ("update", 1.0)):
        records.phase(name)
        now[0] += seconds
    records.add_spans({"worker": [[("sync", 90.0, 95.0), ("generate", 100.5, 102.0)], [("update", 102.0, 103.0)]]})
    records.end(7)
    records.flush()
    (line,) = timeline_of(folder.path)
    assert (line["step"], line["start"]) == (7, 100.0)
    assert [lane["name"] for lane in line["lanes"]] == ["controller", "worker 0", "worker 1"]
    assert [lane["spans"] for lane in line["lanes"]] == [
        [["generate", 0.0, 2.0], ["update", 2.0001, 3.0001]],
        [["generate", 0.5, 2.0]],
        [["update", 2.0, 3.0]],
    ]


def test_a_disk_that_takes_nothing_costs_one_note(tmp_path: Path) -> None:
    batch, notes = batch_of(), list[str]()
    selected, config = chosen_of(batch)
    folder = RunFolder.create(tmp_path / "run")
    folder.samples.rmdir()
    folder.samples.write_text("in the way")
    records = StepRecords(folder, config, notes.append)
    for step in (1, 2):
        records.trained(step, batch, selected, {"worker": [StepReport({}, [], problem="token records: no")]})
        records.flush()
        records.end(step)
    records.flush()
    assert notes == ["token records: no; the run continues without them"]
    assert [json.loads(line)["step"] for line in (folder.path / "timeline.jsonl").read_text().splitlines()] == [1, 2]
