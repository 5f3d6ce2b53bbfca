"""Sends a run's metrics to metrics.jsonl, and with some samples to optional trackers, each in a separate process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlcli.errors import ConfigError
from rlcli.registry import Registry
from rlcli.runs.folder import TRACKERS, RunFolder, write_json
from rlcli.runs.record_files import amend
from rlcli.runs.tracking.tracker import Tracker
from rlcli.runs.tracking.tracker_process import TrackerProcess
from rlcli.support.files import read_object

REGISTRY: Registry[type[Tracker]] = Registry("tracker", "rlcli.trackers")
FINISH_S = 60.0
"""Seconds that all trackers together have to send the rest when the run ends."""
FAILED_S = 10.0
"""The same for a run that fails, or must exit at once."""

SAMPLES_EVERY = 10
"""Trackers get samples of the first step, of every step that this divides, and of every evaluation."""


class Trackers:
    """metrics.jsonl and the configured trackers, as one.

    metrics.jsonl is the record of the run: it is written at once, and if that fails the run fails (`RunFailed`).
    A tracker never stops or delays a step: its errors are reported once, through `warn`, from the thread that calls
    `log` or `close`. As a context manager it is closed at the end, as failed after an exception.
    """

    def __init__(self, folder: RunFolder, processes: Sequence[TrackerProcess], warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._processes = list(processes)
        self._warn = warn

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._folder.append_metrics({"step": step, **metrics})
        self._send(step, metrics)

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add to the metrics of a step that an earlier attempt has logged. wandb ignores that."""
        amend(self._folder.path, step, metrics)
        self._send(step, metrics)

    def image(self, name: str, file: Path) -> None:
        """Send a PNG of the run folder, once it is complete."""
        for process in self._processes:
            process.image(name, file)

    def close(self, failed: bool = False) -> None:
        """Let the trackers send the rest, for at most FINISH_S. failed: mark the run as failed, and wait less. May be
        called again."""
        for process in self._processes:
            process.finish(failed)
        until = time.monotonic() + (FAILED_S if failed else FINISH_S)
        for process in self._processes:
            process.join(until)
        self._report()
        self._processes.clear()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        evaluated = any(name.startswith("eval/") for name in metrics)
        for process in self._processes:
            process.log(step, metrics)
            if evaluated or step == 1 or step % SAMPLES_EVERY == 0:
                process.samples(step, evaluated)
        self._report()

    def _report(self) -> None:
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
    """Start the trackers with these names for the run in `folder`, without waiting for them.

    project: the project's name in the tracker. config: the run's resolved configuration, nested. resumed_at: for a
    resumed run, the last step that is kept (-1: none); a tracker continues the run that it knows. Raises what
    `check_trackers` raises; other failures are reported through `warn`.
    """
    check_trackers(names)
    file, lock = folder.path / TRACKERS, threading.Lock()
    ids = read_object(file)

    def store_id(name: str, run_id: str) -> None:
        """Store the run's id in a tracker. Called from the thread of each."""
        with lock:
            ids[name] = run_id
            write_json(file, ids)

    facts = {"folder": str(folder.path), "project": project, "config": dict(config), "resumed_at": resumed_at}
    processes = [
        TrackerProcess(
            name,
            REGISTRY.target(name),
            facts | {"id": ids.get(name, "")},
            folder.logs / f"tracker-{name}.log",
            partial(store_id, name),
        )
        for name in dict.fromkeys(names)
    ]
    return Trackers(folder, processes, warn)


def check_trackers(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a name that no package publishes, `SetupError` if a tracker's package or its API key is
    missing."""
    for name in names:
        if name not in REGISTRY.names():
            raise ConfigError(
                f"tracking.trackers = {name}: no tracker has that name", f"known: {', '.join(REGISTRY.names())}"
            )
        REGISTRY.get(name).check()
