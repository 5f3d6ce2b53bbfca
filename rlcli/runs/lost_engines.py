"""Reports inference servers that a run's workers lose, from the run's events."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlcli.runs.folder import EVENTS

EVERY_S = 1.0
"""Interval at which `reporting` reads the events."""


class LostEngines:
    """Reads the events that a run's workers add from now on."""

    def __init__(self, run: Path) -> None:
        self._file, self._read = run / EVENTS, 0
        with suppress(OSError):
            self._read = self._file.stat().st_size

    @contextmanager
    def reporting(self, note: Callable[[str], None]) -> Iterator[None]:
        """Call `note` for each lost server during the block, from a thread: the run may be waiting for that server."""
        finished = threading.Event()

        def follow() -> None:
            while not finished.wait(EVERY_S):
                for text in self.new():
                    note(text)

        thread = threading.Thread(target=follow, name="lost engines", daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()
            for text in self.new():
                note(text)

    def new(self) -> Iterator[str]:
        """A line for each server that was lost since the last call."""
        try:
            with self._file.open("rb") as events:
                events.seek(self._read)
                new_bytes = events.read()
        except OSError:
            return
        complete_lines = new_bytes[: new_bytes.rfind(b"\n") + 1]
        self._read += len(complete_lines)
        for line in complete_lines.splitlines():
            with suppress(ValueError, AttributeError):
                event = json.loads(line)
                if event.get("event") == "engine lost":
                    yield f"server {event.get('server')} is lost and is polled until it answers: {event.get('why')}"
