"""The profile of a step: what is in it, whose it is, and that it stays small."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcli.cluster import watchdog
from rlcli.cluster.dispatch import dispatch
from rlcli.cluster.process import worker_profile
from rlcli.support.files import filled_path
from rlcli.training.loop.step_profile import StepProfile, profiled_step
from tests.groups import CalledByName


class Rank(CalledByName):
    """A worker whose methods compute, in this process, called as a group of one."""

    def __len__(self) -> int:
        return 1

    def start_profile(self) -> None:
        worker_profile.start()

    def stop_profile(self, path: str) -> list[str]:
        try:
            worker_profile.stop(Path(filled_path(path, "rank", 0)))
        except OSError as error:
            return [str(error)]
        return [""]

    @dispatch()
    def update(self, times: int = 3) -> None:
        for _ in range(times):
            torch.ones(8, 8).mm(torch.ones(8, 8))
            watchdog.progress()

    @dispatch(collect="stream")
    def rollout(self) -> Iterator[int]:
        for number in range(2):
            with worker_profile.span("decode"):
                torch.ones(4).softmax(0)
            yield number


class OtherRank(Rank):
    """A rank that writes no profile."""

    def start_profile(self) -> None: ...

    def stop_profile(self, path: str) -> list[str]:
        profile = {"pid": 7, "spans": [["update", 10**18, 10**18 + 5000]], "events": []}
        profile["events"] = [{"name": "gemm", "cat": "kernel", "pid": 0, "tid": 7, "ts": 10**18 + 1000, "dur": 2000}]
        with contextlib.suppress(OSError):
            Path(filled_path(path, "rank", 0)).write_text(json.dumps(profile))
        return [""]


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event]


def run(folder: Path, steps: int = 4, step: int = 3, worker: Rank | None = None) -> list[str]:
    worker, notes = worker or Rank(), []
    groups: dict[str, Any] = {"rank": worker, "critic": OtherRank()}
    with StepProfile(folder, groups, step, notes.append) as profile:
        for number in range(1, steps + 1):
            profile.phase("generate", number)
            list(worker.rollout())
            profile.phase("update", number)
            worker.update()
    return notes


def by_name(events: list[dict[str, Any]], process: str) -> dict[str, dict[str, Any]]:
    number = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == process)
    return {event["name"]: event for event in events if event["pid"] == number and event["ph"] == "X"}


@pytest.mark.parametrize("steps", [3, 4])
def test_one_step_is_in_it_with_the_driver_and_every_rank(tmp_path: Path, steps: int) -> None:
    folder = tmp_path / "profile {lr=1} {rank}"
    notes = run(folder, steps)
    (file,) = folder.iterdir()
    assert file.name == "step-3.json.gz"
    assert str(file) in notes[0]
    assert "perfetto" in notes[0]
    events = read(file)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["driver", "rank 0", "critic 0", "critic 0, GPU 0"]
    driver, rank = by_name(events, "driver"), by_name(events, "rank 0")
    assert list(driver) == ["generate", "update"]
    assert {"rollout", "decode", "update", "aten::mm", "aten::softmax"} <= rank.keys()
    assert by_name(events, "critic 0, GPU 0").keys() == {"gemm"}
    assert sum(event["name"] == "aten::mm" for event in events) == 3, "of one step alone"


def test_what_lies_within_a_phase_does_so_in_the_trace(tmp_path: Path) -> None:
    run(tmp_path)
    events = read(tmp_path / "step-3.json.gz")
    driver, rank = by_name(events, "driver"), by_name(events, "rank 0")

    def within(inner: dict[str, Any], outer: dict[str, Any], slack: float = 0.0) -> bool:
        begins, ends = inner["ts"] >= outer["ts"] - slack, inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
        return begins and ends

    assert within(rank["rollout"], driver["generate"])
    assert within(rank["update"], driver["update"])
    assert within(rank["decode"], rank["rollout"])
    assert within(rank["aten::mm"], rank["update"], slack=1000)  # torch's clock is another
    assert 0 <= driver["generate"]["ts"] < 1e6, "time begins with the step"


def test_only_the_longest_events_of_the_first_calls_and_seconds_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_profile, "MOST_EVENTS", 4)
    rank = Rank()
    worker_profile.start()
    for _ in range(5):
        rank.update(2)
    worker_profile.stop(tmp_path / "part.json")
    part = json.loads((tmp_path / "part.json").read_text())
    assert [span[0] for span in part["spans"]] == ["update"] * 5
    assert len(part["events"]) == 2 * 4

    monkeypatch.setattr(worker_profile, "RECORD_S", 0.0)
    monkeypatch.setattr(worker_profile, "MOST_EVENTS", 1000)
    worker_profile.start()
    rank.update(50)
    worker_profile.stop(tmp_path / "part.json")
    part = json.loads((tmp_path / "part.json").read_text())
    assert sum(event["name"] == "aten::mm" for event in part["events"]) < 50


def test_a_profiled_step_that_is_taken_back_and_done_again_is_written_once(tmp_path: Path) -> None:
    notes: list[str] = []
    with StepProfile(tmp_path, {"rank": Rank()}, 2, notes.append) as profile:  # type: ignore[dict-item]
        for name, step in [("update", 1), ("update", 2), ("restore", 1), ("update", 2), ("update", 3)]:
            profile.phase(name, step)
    assert len(notes) == 1
    assert list(by_name(read(tmp_path / "step-2.json.gz"), "driver")) == ["update"]
    assert watchdog.listeners == []


def test_a_folder_that_cannot_be_written_is_noted(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file is in its place")
    (note,) = run(tmp_path / "profile")
    assert "could not be written" in note
    assert watchdog.listeners == [], "nothing goes on being recorded"


@pytest.mark.parametrize("doing", ["start", "stop", "export_chrome_trace"])
@pytest.mark.parametrize("error", [RuntimeError("no trace"), KeyError("traceEvents"), OSError("disk full")])
def test_whatever_torchs_profiler_raises_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: str, error: Exception
) -> None:
    real = getattr(torch.profiler.profile, doing)

    def failing(self: Any, *args: Any) -> None:
        real(self, *args)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(torch.profiler.profile, doing, failing)
        (note,) = run(tmp_path / "profile")
    assert f"could not be written: torch's profiler failed: {type(error).__name__}" in note
    assert watchdog.listeners == []


def test_nothing_is_recorded_unless_asked(tmp_path: Path) -> None:
    assert run(tmp_path / "profile", steps=2) == []
    assert not (tmp_path / "profile").exists()
    assert watchdog.listeners == []


@pytest.mark.parametrize(("first", "last", "step"), [(1, 100, 3), (1, 2, 2), (1, 1, 1), (51, 100, 53), (100, 100, 100)])
def test_the_third_step_is_profiled_or_the_last(first: int, last: int, step: int) -> None:
    assert profiled_step(first, last) == step
