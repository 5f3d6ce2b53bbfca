"""What a tracker is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is started for.

    folder: of the run; what the tracker stores on this machine goes below it, unless the tracker's own environment
    variables name another place. project: its name in the tracker. config: the resolved configuration, nested.
    id: what the tracker called this run before it was interrupted; empty for a new one. resumed_at: the last step that
    stands, where the run goes on after it; -1 where none does.
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
    """Something that is told each step's metrics. It lives in a process of its own, so it may raise, print, block or
    die, and the run goes on. A module with a function `start` makes one:

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
        """What the tracker calls the run, to go on with after an interruption; empty where it needs nothing."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None:
        """Send what is left. failed: the run did not end well."""
