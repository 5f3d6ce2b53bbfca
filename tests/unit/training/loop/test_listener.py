"""Listeners come from entry points, receive each part of a run, and cannot end it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from rlcli.config.schema import RunConfig
from rlcli.errors import RunFailed
from rlcli.runs.folder import RunFolder
from rlcli.runs.tracking.run_console import View
from rlcli.training.listener import ListenedRun, Listener, Listeners, listener_types
from rlcli.training.loop.trainer import Trainer
from rlcli.training.worker.worker_pools import WorkerPools
from rlcli.training.worker.worker_spec import WorkerSpec
from tests.contexts import context_of
from tests.trainers import PROMPTS, Stop


class Recorder(Listener):
    """Records its calls."""

    def __init__(self, run: ListenedRun) -> None:
        self.run = run
        self.calls: list[tuple[str, int]] = []

    def begin(self, done: int) -> None:
        self.calls.append(("begin", done))

    def phase(self, name: str, step: int) -> None:
        self.calls.append((name, step))

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("step", number))

    def finish(self, number: int) -> None:
        self.calls.append(("finish", number))

    def close(self) -> None:
        self.calls.append(("close", 0))


class Failing(Listener):
    """Fails when a step is done."""

    def __init__(self, error: Exception) -> None:
        self.error, self.steps = error, 0

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        self.steps += 1
        raise self.error


def trainer_with(folder: Path, listeners: Mapping[str, type[Recorder]]) -> Trainer:
    groups = WorkerPools(MagicMock(), None, None, MagicMock(spec=WorkerSpec))
    config = RunConfig.model_validate({"train": {"steps": 2}})
    view = MagicMock(spec=View, show_samples=0)
    return Trainer(
        context_of(config), PROMPTS, None, groups, RunFolder.create(folder), MagicMock(), view, Stop(), listeners
    )


def test_the_built_in_listeners_are_published_like_those_of_packages() -> None:
    assert {name: created.__qualname__ for name, created in listener_types().items()} == {  # type: ignore[attr-defined]
        "hacking": "HackingAlarms",
        "pace": "PaceReport",
    }


def test_a_listener_receives_each_step_of_a_run_and_its_end(tmp_path: Path) -> None:
    created: list[Recorder] = []

    class Observed(Recorder):
        def __init__(self, run: ListenedRun) -> None:
            super().__init__(run)
            created.append(self)

    trainer = trainer_with(tmp_path / "run", {"recorder": Observed})
    trainer.log_prob_check = MagicMock()
    trainer.checkpointer = MagicMock(saved=2)
    trainer.step = lambda number: {"reward/mean": 1.0}  # type: ignore[method-assign]
    trainer.sync_weights = MagicMock()  # type: ignore[method-assign]
    trainer.run()
    (recorder,) = created
    assert recorder.run.path == tmp_path / "run"
    calls = [call for call in recorder.calls if call[0] in ("begin", "step", "finish", "close")]
    assert calls == [("begin", 0), ("step", 1), ("step", 2), ("finish", 2), ("close", 0)]
    assert ("sync", 0) in recorder.calls, "phases reach it too"


def test_a_listener_that_raises_is_dropped_and_the_others_are_called(tmp_path: Path) -> None:
    notes: list[str] = []
    failing = Failing(KeyError("reward"))
    recorder = Recorder(ListenedRun(tmp_path, RunConfig(), notes.append, MagicMock(), MagicMock()))
    listeners = Listeners(notes.append, [failing, recorder])
    listeners.step(1, {})
    listeners.step(2, {})
    assert failing.steps == 1
    assert recorder.calls == [("step", 1), ("step", 2)]
    (note,) = notes
    assert note.endswith("Failing failed and is not called again: KeyError: 'reward'")


def test_a_listener_that_cannot_be_created_is_left_out(tmp_path: Path) -> None:
    notes: list[str] = []

    def broken(run: ListenedRun) -> Listener:
        raise OSError("no device")

    run = ListenedRun(tmp_path, RunConfig(), notes.append, MagicMock(), MagicMock())
    listeners = Listeners.of(run, {"beeper": broken, "recorder": Recorder})
    listeners.step(1, {})
    assert notes == ["the listener beeper cannot follow this run: OSError: no device"]


def test_all_listeners_are_closed_before_an_error_of_the_run_is_raised(tmp_path: Path) -> None:
    recorder = Recorder(ListenedRun(tmp_path, RunConfig(), print, MagicMock(), MagicMock()))
    first = MagicMock(spec=Listener)
    first.close.side_effect = RunFailed("a worker died", "resume it")
    with pytest.raises(RunFailed):
        Listeners(print, [first, recorder]).close()
    assert recorder.calls == [("close", 0)]


def test_an_error_of_the_run_is_raised_through_listeners() -> None:
    with pytest.raises(RunFailed):
        Listeners(print, [Failing(RunFailed("a worker died", "resume it"))]).step(1, {})


def test_a_listener_needs_to_override_only_what_it_uses() -> None:
    notes: list[str] = []
    listeners = Listeners(notes.append, [Listener()])
    listeners.begin(0)
    listeners.evaluated(0, {})
    listeners.generated(MagicMock())
    listeners.phase("update", 1)
    listeners.finish(1)
    listeners.close()
    assert notes == []
