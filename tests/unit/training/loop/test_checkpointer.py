"""Checkpoints in the loop: when they are committed, and what a failed write costs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcli.algorithms.controllers import EntropyController, KlController
from rlcli.config.schema import RunConfig
from rlcli.data.prompts.cursor import PromptCursor
from rlcli.data.sample_files import write_samples
from rlcli.errors import RunFailed
from rlcli.runs.checkpoint import Checkpoint, Checkpoints
from rlcli.runs.folder import RunFolder, events_of
from rlcli.runs.record_files import metrics_of
from rlcli.runs.run_measure import REWARD
from rlcli.support.files import described
from rlcli.training.loop.checkpointer import Checkpointer
from rlcli.training.loop.trainer import Trainer
from tests.groups import CalledByName


class Writers(CalledByName):
    """Two workers that write a file each; `busy`: not yet. failing: what the second one raises."""

    def __init__(self) -> None:
        self.busy = False
        self.failing: Exception | None = None
        self.folder = Path()

    def save_state(self, folder: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir()
        for rank in range(2):
            (self.folder / f"rank-{rank}.pt").write_text(str(rank))

    def state_saved(self, wait: bool) -> list[dict[str, Any] | None]:
        if self.failing:
            raise self.failing
        names = [f"{self.folder.name}/rank-{rank}.pt" for rank in range(2)]
        files: list[dict[str, Any] | None] = [{name: described(self.folder.parent / name)} for name in names]
        return [files[0], None] if self.busy and not wait else files

    def load_state(self, folder: str) -> None:
        pass

    def write_waiting(self, path: str, shards: list[list[Any]]) -> dict[str, Any]:
        Path(path).write_text(json.dumps(shards))
        return {Path(path).name: described(Path(path))}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config("[train]\nsteps = 9\n")
        folder.append_metrics({"step": 1, "reward/mean": 0.5})
        yield folder


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def workers() -> Writers:
    return Writers()


@pytest.fixture
def checkpointer(folder: RunFolder, workers: Writers, notes: list[str]) -> Checkpointer:
    checkpoints = Checkpoints(folder.checkpoints, keep=1, keep_best=1)
    return Checkpointer(checkpoints, folder, workers, None, notes.append)  # type: ignore[arg-type]


def state(step: int) -> dict[str, Any]:
    return {"step": step, "waiting": []}


def kept(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.iterdir())


def test_a_checkpoint_is_committed_once_every_rank_has_written_its_part(
    checkpointer: Checkpointer, folder: RunFolder, workers: Writers
) -> None:
    workers.busy = True
    checkpointer.begin(1, state(1), ["shard"])
    checkpointer.poll()
    assert kept(folder) == [".step-000001.partial"]
    checkpointer.evaluated(1, {"pass@1": 0.5})
    workers.busy = False
    checkpointer.poll()
    assert kept(folder) == ["latest", "step-000001"]
    step_folder = folder.checkpoints / "step-000001"
    assert json.loads((step_folder / "state.json").read_text())["evaluation"] == {"pass@1": 0.5}
    files = json.loads((step_folder / "manifest.json").read_text())["files"]
    assert set(files) == {"policy/rank-0.pt", "policy/rank-1.pt", "waiting.npz", "state.json", "config.toml"}
    assert [event["event"] for event in events_of(folder.path)] == ["checkpoint"]
    checkpointer.finish()


@pytest.mark.parametrize(
    ("best_by", "best"), [("mean@1", "step-000002"), ("pass@1", "step-000001"), ("maj@4", "step-000003")]
)
def test_the_best_checkpoint_is_kept_by_the_measure_that_is_asked_for(
    best_by: str, best: str, folder: RunFolder, workers: Writers, notes: list[str]
) -> None:
    checkpoints = Checkpoints(folder.checkpoints, keep=1, keep_best=1)
    checkpointer = Checkpointer(checkpoints, folder, workers, None, notes.append, best_by=best_by)  # type: ignore[arg-type]
    measured = {
        1: {"pass@1": 1.0, "mean@1": 0.1, "maj@4": 0.2},
        2: {"pass@1": 0.9, "mean@1": 0.3, "maj@4": 0.3},
        3: {"pass@1": 0.9, "mean@1": 0.2, "maj@4": 0.4},
        4: {"pass@1": 0.5, "mean@1": 0.0, "maj@4": 0.1},
    }
    for step, metrics in measured.items():
        checkpointer.begin(step, state(step), [])
        checkpointer.evaluated(step, metrics)
    checkpointer.finish()
    assert kept(folder) == sorted(["latest", best, "step-000004"])


def test_the_next_checkpoint_waits_for_the_one_before_it(
    checkpointer: Checkpointer, folder: RunFolder, workers: Writers
) -> None:
    workers.busy = True
    for step in (1, 2):
        checkpointer.begin(step, state(step), [])
        checkpointer.evaluated(step, {"pass@1": 1.0, "mean@1": 1.0 - step / 10})
    assert kept(folder) == [".step-000002.partial", "latest", "step-000001"]
    checkpointer.finish()
    assert kept(folder) == ["latest", "step-000001", "step-000002"]  # the newest, and the best


def test_a_write_that_fails_is_told_and_costs_only_that_checkpoint(
    checkpointer: Checkpointer, folder: RunFolder, workers: Writers, notes: list[str]
) -> None:
    checkpointer.begin(1, state(1), [])
    checkpointer.poll()
    workers.failing = RunFailed("rank 1: cannot write: No space left on device")
    checkpointer.begin(2, state(2), [])
    checkpointer.poll()
    assert kept(folder) == ["latest", "step-000001"]
    assert notes == [
        "the checkpoint of step 2 could not be written: rank 1: cannot write: No space left on device; the "
        "previous one, step-000001, is kept"
    ]
    assert events_of(folder.path)[-1]["event"] == "checkpoint_failed"
    with pytest.raises(RunFailed, match=r"the last checkpoint, of step 2, .*No space left on device; the previous one"):
        checkpointer.finish()
    workers.failing = None
    checkpointer.begin(3, state(3), [])
    checkpointer.finish()
    assert checkpointer.newest == folder.checkpoints / "step-000003"


def test_workers_that_are_gone_are_no_failed_checkpoint(
    checkpointer: Checkpointer, folder: RunFolder, workers: Writers
) -> None:
    checkpointer.begin(1, state(1), [])
    workers.failing = RunFailed("worker 1 died", retry=True)
    with pytest.raises(RunFailed, match="worker 1 died"):
        checkpointer.poll()
    assert events_of(folder.path) == []


def test_a_rank_that_cannot_copy_its_state_is_no_failed_checkpoint(
    checkpointer: Checkpointer, workers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: str) -> None:
        raise RunFailed("worker 1 ran out of memory in save_state")

    monkeypatch.setattr(workers, "save_state", fails)
    with pytest.raises(RunFailed, match="worker 1 ran out of memory"):  # the other ranks write, and wait for it
        checkpointer.begin(1, state(1), [])


def test_what_is_recorded_is_on_the_disk_before_its_checkpoint(
    checkpointer: Checkpointer, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").resolve().name)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    for step in (1, 2):
        for rank in range(3):  # they bring their samples to the disk themselves
            write_samples(folder.samples / f"step-{step:06d}" / f"rank-{rank}.parquet", step, [])
        files = [f".rank-{rank}.parquet.{os.getpid()}.tmp" for rank in range(3)]
        assert synced == [name for file in files for name in (file, f"step-{step:06d}")]
        synced.clear()
        (folder.evaluations / f"step-{step:06d}.json").touch()
        checkpointer.begin(step, state(step), [])
        checkpointer.poll(wait=True)
        before_it = synced[: synced.index("manifest.json")]
        record_file = f"step-{step:06d}.json"
        assert before_it[:5] == ["metrics.jsonl", record_file, "run", "samples", "evaluations"]
        assert not [name for name in synced if name.endswith(".parquet")]
        synced.clear()


@pytest.mark.parametrize("sound", [True, False])
def test_the_record_is_cut_back_only_once_the_checkpoint_has_proved_itself(
    checkpointer: Checkpointer, folder: RunFolder, notes: list[str], sound: bool
) -> None:
    for step in (2, 3):
        folder.append_metrics({"step": step, "reward/mean": 0.5})
    metrics_before = (folder.path / "metrics.jsonl").read_bytes()
    algorithm = SimpleNamespace(kl=KlController(0.1), entropy=EntropyController(0.0))
    cursor = PromptCursor(4, 0, shuffle=True)
    trainer: Any = SimpleNamespace(
        folder=folder,
        checkpointer=checkpointer,
        dtype="float32",
        view=SimpleNamespace(note=notes.append),
        workers=SimpleNamespace(call=lambda method, tokens: [-1.1 if sound else -2.0]),
        source=SimpleNamespace(
            has_started=False, cursor=PromptCursor(4, 0, shuffle=True), restore=lambda state, shards: None
        ),
        config=RunConfig(),
        curve_measure=REWARD,
        algorithm=algorithm,
        guard=SimpleNamespace(restore=lambda counts: None),
        warnings=SimpleNamespace(restore=lambda state: None),
        invariants=SimpleNamespace(forget=lambda: None),
    )
    checkpoint = Checkpoint(folder.checkpoints / "step-000002", 2)
    trainer_state = {"cursor": cursor.state(), "kl": algorithm.kl.state(), "entropy": algorithm.entropy.state()}
    trainer_state |= {"waiting": [], "bad_updates": {}, "warnings": {}, "version": 3, "dtype": "bfloat16"}
    vars(checkpoint)["state"] = trainer_state | {"probe": {"tokens": [1, 2], "log_probs": [-1.2]}}
    if sound:
        Trainer.load(trainer, checkpoint)
        assert [line["step"] for line in metrics_of(folder.path)] == [1, 2]
        assert (checkpointer.saved, trainer.steps_done, trainer.version) == (2, 2, 2)
    else:
        with pytest.raises(RunFailed, match=r"are not those that were saved: .* differ by 0\.8"):
            Trainer.load(trainer, checkpoint)
        assert (folder.path / "metrics.jsonl").read_bytes() == metrics_before
    assert notes == ["from here on the run computes in float32, before in bfloat16"]
