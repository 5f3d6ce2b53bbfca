"""What a run's workers record of servers that they lose, for the one who watches it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlcli.runs.folder import EVENTS

EVERY_S = 1.0
"""Interval at which `told` looks."""


class LostEngines:
    """Reads the events that a run's workers add from now on."""

    def __init__(self, run: Path) -> None:
        self._file, self._read = run / EVENTS, 0
        with suppress(OSError):
            self._read = self._file.stat().st_size

    @contextmanager
    def told(self, note: Callable[[str], None]) -> Iterator[None]:
        """Meanwhile note each one as it happens, whatever the run waits for: that may be the lost server."""
        over = threading.Event()

        def follow() -> None:
            while not over.wait(EVERY_S):
                for text in self.new():
                    note(text)

        thread = threading.Thread(target=follow, name="lost engines", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            for text in self.new():
                note(text)

    def new(self) -> Iterator[str]:
        """A line for each server that was lost since the last call."""
        try:
            with self._file.open("rb") as events:
                events.seek(self._read)
                found = events.read()
        except OSError:
            return
        whole = found[: found.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError, AttributeError):
                event = json.loads(line)
                if event.get("event") == "engine lost":
                    yield f"server {event.get('server')} is lost, and asked again until it answers: {event.get('why')}"
