"""The tracker protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is started for.

    folder: of the run; the tracker's local files go below it, unless the tracker's own environment variables name
    another place. project: its name in the tracker. config: the resolved configuration, nested. id: the run's id in the
    tracker before it was interrupted; empty for a new run. resumed_at: for a resumed run, the last step that is kept;
    -1 if none is.
    """

    folder: Path
    project: str
    config: Mapping[str, Any]
    id: str = ""
    resumed_at: int | None = None

    @property
    def name(self) -> str:
        return self.folder.name


class Tracker(Protocol):
    """Receives each step's metrics. It runs in a separate process, so it may raise, print, block or die, and the run
    continues. A module with a function `start` makes one:

        class Printer:
            id = ""

            def log(self, step: int, metrics: Mapping[str, float]) -> None:
                print(step, metrics)

            def close(self, failed: bool) -> None: ...

        def start(run: TrackedRun) -> Tracker:
            return Printer()
    """

    @property
    def id(self) -> str:
        """The run's id in the tracker, for resuming after an interruption; empty if it needs none."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None:
        """Send the rest. failed: the run failed."""
