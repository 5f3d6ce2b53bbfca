"""Where a run's metrics go: metrics.jsonl always, other trackers by option, each in a process of its own."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from rlcli.errors import SetupError
from rlcli.trainer.record import amend
from rlcli.trainer.run_folder import TRACKERS, RunFolder, write_json
from rlcli.trainer.tracking.process import TrackerProcess

MODULES = {name: f"rlcli.trainer.tracking.{name}" for name in ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")}
"""The module of each tracker; its `start` takes a TrackedRun and returns a Tracker."""
FINISH_S = 60.0
"""Seconds that the trackers have, together, to send what is left when the run ends."""
FAILED_S = 10.0
"""The same of a run that fails, or is told to leave at once."""


class Trackers:
    """metrics.jsonl and the trackers asked for, as one.

    metrics.jsonl is the record of the run: it is written at once, and where that fails the run fails (`RunFailed`).
    A tracker never stops or delays a step: what goes wrong with it is told once, through `warn`, from the thread that
    calls `log` or `close`. As a context it is closed at the end, as failed where an exception ends it.
    """

    def __init__(self, folder: RunFolder, processes: Sequence[TrackerProcess], warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._processes = list(processes)
        self._warn = warn

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._folder.append_metrics({"step": step, **metrics})
        self._send(step, metrics)

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add to the metrics of a step that an earlier attempt has logged. Of the trackers wandb ignores that."""
        amend(self._folder.path, step, metrics)
        self._send(step, metrics)

    def close(self, failed: bool = False) -> None:
        """Let the trackers send what is left, for FINISH_S at most. failed: mark the run so, and wait less. Again is
        harmless."""
        for process in self._processes:
            process.finish(failed)
        until = time.monotonic() + (FAILED_S if failed else FINISH_S)
        for process in self._processes:
            process.join(until)
        self._tell()
        self._processes.clear()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        for process in self._processes:
            process.log(step, metrics)
        self._tell()

    def _tell(self) -> None:
        for process in self._processes:
            for note in process.notes():
                self._warn(note)


def open_trackers(
    names: Sequence[str],
    folder: RunFolder,
    project: str,
    config: Mapping[str, Any],
    warn: Callable[[str], None],
    resumed_at: int | None = None,
) -> Trackers:
    """Start the trackers called `names` for the run in `folder`, and wait for none of them.

    project: the project's name in the tracker. config: the run's resolved configuration, nested. resumed_at: the last
    step that stands, where the run goes on after it (-1: none does); a tracker goes on with the run that it knows from
    before. Raises `SetupError` where `check_trackers` does; any other failure is told through `warn`.
    """
    check_trackers(names)
    ids = _Ids(folder.path / TRACKERS)
    facts = {"folder": str(folder.path), "project": project, "config": dict(config), "resumed_at": resumed_at}
    processes = [
        TrackerProcess(
            name,
            MODULES[name],
            facts | {"id": ids.get(name)},
            folder.logs / f"tracker-{name}.log",
            partial(ids.put, name),
        )
        for name in dict.fromkeys(names)
    ]
    return Trackers(folder, processes, warn)


def check_trackers(names: Sequence[str]) -> None:
    """Raise `SetupError` where a tracker's package or its API key is missing."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder `wandb` of the working directory is no package
            raise SetupError(
                f"tracking.trackers names {name}, which is not installed",
                f"pip install 'rlcli[{name}]', or leave it out",
            )
        if name in KEYS and not KEYS[name]():
            variable = f"{name.upper()}_MODE"
            raise SetupError(f"{name} has no API key", f"run `{name} login`, or set {variable}=offline")


def _wandb_has_key() -> bool:
    """Whether wandb needs none, or has one."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return True
    import wandb

    return bool(wandb.login(prompt=False, verify=False))


def _swanlab_has_key() -> bool:
    """The same of swanlab."""
    if os.environ.get("SWANLAB_MODE", "online") != "online":
        return True
    import swanlab

    return bool(swanlab.Settings().api_key)


KEYS: Mapping[str, Callable[[], bool]] = {"wandb": _wandb_has_key, "swanlab": _swanlab_has_key}


class _Ids:
    """What each tracker calls the run, in trackers.json of its folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._ids: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._ids = {}

    def get(self, name: str) -> str:
        return self._ids.get(name, "")

    def put(self, name: str, found: str) -> None:
        with self._lock:
            self._ids[name] = found
            write_json(self._path, self._ids)
