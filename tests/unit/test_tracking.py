from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rlcli.errors import SetupError
from rlcli.trainer import tracking
from rlcli.trainer.run_folder import RunFolder
from rlcli.trainer.tracking import Trackers, open_trackers

CONFIG = {"train": {"lr": 1e-6, "steps": 2}}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "run") as folder:
        yield folder


@pytest.fixture
def warnings() -> list[str]:
    return []


def metrics_lines(folder: RunFolder) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_always_in_the_run_folder(folder: RunFolder, warnings: list[str]) -> None:
    trackers = open_trackers([], folder, "rlcli", CONFIG, warnings.append)
    trackers.log(1, {"reward/mean": 0.5})
    trackers.log(2, {"reward/mean": 0.75})
    trackers.close()
    assert metrics_lines(folder) == [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75}]
    assert warnings == []


def test_tensorboard_reads_back_what_was_logged(folder: RunFolder, warnings: list[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = open_trackers(["tensorboard"], folder, "rlcli", CONFIG, warnings.append)
    for step, reward in [(1, 0.5), (2, 0.75), (3, math.nan)]:
        trackers.log(step, {"reward/mean": reward})
    trackers.close()
    assert warnings == []
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")][:2] == [(1, 0.5), (2, 0.75)]


def stored_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a 7-byte header, then LevelDB's log format in blocks of 32 KiB."""
    record, at = b"", 7
    while at + 7 <= len(data):
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768


def test_wandb_offline_stores_the_run_in_its_folder(
    folder: RunFolder, warnings: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import wandb
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    trackers = open_trackers(["wandb"], folder, "arith", CONFIG, warnings.append)
    trackers.log(1, {"reward/mean": 0.5})
    trackers.log(2, {"reward/mean": 0.75})
    trackers.close()
    assert warnings == []
    assert capfd.readouterr() == ("", "")
    wandb.teardown()  # its service writes on after the run's end; leaving the process waits for it too
    (stored,) = (folder.path / "wandb").glob("offline-run-*/*.wandb")
    history, project = [], ""
    for data in stored_records(stored.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        project = record.run.project or project
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            history.append((record.history.step.num, items["reward/mean"]))
    assert project == "arith"
    assert history == [(1, 0.5), (2, 0.75)]


def test_wandb_without_a_key_is_refused_before_it_could_ask_for_one(
    folder: RunFolder, warnings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    with pytest.raises(SetupError, match=r"wandb has no API key; run `wandb login`, or set WANDB_MODE=offline"):
        open_trackers(["wandb"], folder, "rlcli", CONFIG, warnings.append)


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_package_names_the_extra(
    name: str, folder: RunFolder, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(tracking, "find_spec", lambda asked: None if asked == name else real(asked))
    with pytest.raises(SetupError, match=rf"{name}, which is not installed; pip install 'rlcli\[{name}\]'"):
        open_trackers([name], folder, "rlcli", CONFIG, warnings.append)


class Failing:
    """A tracker whose server is gone; it counts how often it was asked."""

    def __init__(self, at_close: bool = False) -> None:
        self.at_close = at_close
        self.asked = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.asked += 1
        if not self.at_close:
            raise ConnectionError("server\ngone")

    def close(self) -> None:
        self.asked += 1
        raise ConnectionError("server gone")


def test_a_tracker_that_fails_warns_once_and_is_off_and_the_others_go_on(
    folder: RunFolder, warnings: list[str]
) -> None:
    failing, late = Failing(), Failing(at_close=True)
    trackers = Trackers(folder, {"first": failing, "second": late}, warnings.append)
    for step in (1, 2, 3):
        trackers.log(step, {"reward/mean": 0.5})
    assert warnings == ["first is off for the rest of the run: ConnectionError: server gone"]
    assert failing.asked == 1
    assert late.asked == 3
    trackers.close()
    trackers.close()
    assert len(warnings) == 2
    assert len(metrics_lines(folder)) == 3


def test_a_tracker_that_does_not_start_warns_and_the_run_goes_on(
    folder: RunFolder, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.path / "tensorboard").write_text("in the way")
    trackers = open_trackers(["tensorboard"], folder, "rlcli", CONFIG, warnings.append)
    trackers.log(1, {"reward/mean": 0.5})
    trackers.close()
    assert len(warnings) == 1
    assert warnings[0].startswith("tensorboard is off for ")
    assert len(metrics_lines(folder)) == 1
