"""Reads files of JSON lines that a run still appends to: only what is new, and never an incomplete line."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

MISSING = math.nan
BLOCK = 1 << 24
"""Bytes read at once."""


class JsonLines:
    """Calls `take` with every new object of a file, and `reset` when the file was replaced or truncated.

    skipped: lines that are not JSON objects. cut: whether the last line is incomplete: the run was killed while it
    wrote the line, or is writing it now.
    """

    def __init__(self, path: Path, take: Callable[[dict[str, Any]], None], reset: Callable[[], None]) -> None:
        self.path = path
        self.skipped, self.cut, self.error = 0, False, ""
        self._take, self._reset = take, reset
        self._end = 0
        self._seen: tuple[int, int, float] | None = None
        self._inode = 0

    def refresh(self) -> bool:
        """Read what was added since the last call; whether anything was. Never raises for a bad file."""
        try:
            now = self.path.stat()
            seen = (now.st_ino, now.st_size, now.st_mtime)
            if seen == self._seen:
                return False
            if now.st_ino != self._inode or now.st_size < self._end:
                self._begin(now.st_ino)
            self._read()
            self._seen, self.error = seen, ""
        except FileNotFoundError:
            if self._seen is None:
                return False
            self._begin(0)
            self._seen = None
        except OSError as error:
            changed, self.error = not self.error, error.strerror or str(error)
            return changed
        return True

    def notes(self) -> list[str]:
        """What could not be read, one line each."""
        name = self.path.name
        found = [f"{name} cannot be read: {self.error}"] if self.error else []
        if self.skipped:
            found.append(
                f"{name}: {self.skipped} {'line is' if self.skipped == 1 else 'lines are'} damaged and left out"
            )
        return [*found, *([f"{name}: the last line is incomplete and left out"] if self.cut else [])]

    def _begin(self, inode: int) -> None:
        self._end, self._inode = 0, inode
        self.skipped, self.cut = 0, False
        self._reset()

    def _read(self) -> None:
        rest = b""
        with self.path.open("rb") as file:
            file.seek(self._end)
            while block := file.read(BLOCK):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    self._line(line)
                    self._end += len(line) + 1
        # A complete object without a line feed is read once the line feed is there: it may still grow.
        self.cut = bool(rest.strip())

    def _line(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            self._take(found)
        else:
            self.skipped += 1


class Metrics:
    """metrics.jsonl as columns of float64, NaN where a step lacks a value. 10,000 steps take a few megabytes."""

    def __init__(self, path: Path) -> None:
        self.steps: list[int] = []
        self._columns: dict[str, array[float]] = {}
        self.lines = JsonLines(path, self._take, self._clear)

    def names(self) -> list[str]:
        """The metrics that occur, sorted."""
        return sorted(self._columns)

    def column(self, name: str) -> list[float | None]:
        """The values of a metric, one for each of `steps`; None where it is missing or not finite."""
        found = self._columns.get(name)
        if found is None:
            return [None] * len(self.steps)
        values = [value if math.isfinite(value) else None for value in found]
        return values + [None] * (len(self.steps) - len(values))

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric wherever it has a finite value."""
        return [(step, value) for step, value in zip(self.steps, self.column(name), strict=True) if value is not None]

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        return next((value for value in reversed(self.column(name)) if value is not None), None)

    def _take(self, line: dict[str, Any]) -> None:
        step = line.pop("step", None)
        if not isinstance(step, int) or isinstance(step, bool):
            self.lines.skipped += 1
            return
        row = len(self.steps)
        self.steps.append(step)
        for name, value in line.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                column = self._columns.get(name)
                if column is None:
                    column = self._columns[name] = array("d")
                if len(column) < row:
                    column.extend([MISSING] * (row - len(column)))
                column.append(_double(value))

    def _clear(self) -> None:
        self.steps.clear()
        self._columns.clear()


def _double(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # JSON's integers have no limit
        return MISSING
