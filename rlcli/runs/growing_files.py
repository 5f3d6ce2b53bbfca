"""Reads files of JSON lines that a run still appends to: only what is new, and never an incomplete line."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlcli.support.reading import LINE_BYTES, UnfitFile, check_regular, json_object, opened

MISSING = math.nan
_STEP = re.compile(rb'"step": ?(\d{1,15})')
BLOCK = 1 << 24
"""Bytes read at once."""


class GrowingFile:
    """Calls `take` with every new complete line of a file and its offset, and `reset` when the file was replaced or
    truncated.

    take: returns False for a damaged line; `skipped` counts them. cut: the last line is incomplete, since the run was
    killed while it wrote the line, or is writing it now.
    """

    def __init__(self, path: Path, take: Callable[[bytes, int], bool], reset: Callable[[], None]) -> None:
        self.path = path
        self.skipped, self.cut, self.error = 0, False, ""
        self._take, self._reset = take, reset
        self._end = 0
        self._seen: tuple[int, int, float] | None = None
        self._inode = 0

    def refresh(self) -> bool:
        """Read what was added since the last call. Returns True if there was anything. Never raises for a damaged file,
        only `UnfitFile`."""
        try:
            status = check_regular(self.path)
            seen = (status.st_ino, status.st_size, status.st_mtime)
            if seen == self._seen:
                return False
            if status.st_ino != self._inode or status.st_size < self._end:
                self._begin(status.st_ino)
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
        """Lines of text about what could not be read."""
        name, are = self.path.name, "line is" if self.skipped == 1 else "lines are"
        lines = [f"{name} cannot be read: {self.error}"] if self.error else []
        if self.skipped:
            lines.append(f"{name}: {self.skipped} {are} damaged and left out")
        return [*lines, *([f"{name}: the last line is incomplete and left out"] if self.cut else [])]

    def _begin(self, inode: int) -> None:
        self._end, self._inode = 0, inode
        self.skipped, self.cut = 0, False
        self._reset()

    def _read(self) -> None:
        rest = b""
        with opened(self.path) as file:
            file.seek(self._end)
            while block := file.read(BLOCK):
                *lines, rest = (rest + block).split(b"\n")
                if len(rest) > LINE_BYTES:
                    raise UnfitFile(self.path, f"has a line of more than {LINE_BYTES >> 20} MiB", "remove that line")
                for line in lines:
                    if line.strip() and not self._take(line, self._end):
                        self.skipped += 1
                    self._end += len(line) + 1
        # Even if it is a complete object: the run may still be writing the line.
        self.cut = bool(rest.strip())


class Records:
    """The objects of a file of JSON lines, in `records`."""

    def __init__(self, path: Path) -> None:
        self.records: list[dict[str, Any]] = []
        self.file = GrowingFile(path, self._take, self.records.clear)

    def _take(self, line: bytes, offset: int) -> bool:
        record = json_object(line)
        if record is not None:
            self.records.append(record)
        return record is not None


class Timeline:
    """Index of timeline.jsonl. Only offset and length of its lines are kept, since a line has every span of every
    worker."""

    def __init__(self, path: Path) -> None:
        self._lines: dict[int, tuple[int, int]] = {}
        self.file = GrowingFile(path, self._take, self._lines.clear)

    def steps(self) -> list[int]:
        """The steps that have a line, ascending."""
        return sorted(self._lines)

    def line(self, step: int) -> dict[str, Any] | None:
        """The line of a step; None if there is none, or it is damaged."""
        if step not in self._lines:
            return None
        offset, length = self._lines[step]
        try:
            with opened(self.file.path) as file:
                file.seek(offset)
                return json_object(file.read(length))
        except OSError:
            return None

    def _take(self, line: bytes, offset: int) -> bool:
        match = _STEP.search(line[:200])
        step = int(match[1]) if match and line.rstrip().endswith(b"}") else None
        if step is not None:
            self._lines[step] = (offset, len(line))
        return step is not None


class Metrics:
    """metrics.jsonl as columns of float64, NaN where a step lacks a value. 10,000 steps take a few megabytes."""

    def __init__(self, path: Path) -> None:
        self.steps: list[int] = []
        self._columns: dict[str, array[float]] = {}
        self.file = GrowingFile(path, self._take, self._clear)

    def names(self) -> list[str]:
        """The metrics that occur, sorted."""
        return sorted(self._columns)

    def column(self, name: str) -> list[float | None]:
        """The values of a metric, one for each of `steps`; None where it is missing or not finite."""
        stored = self._columns.get(name)
        if stored is None:
            return [None] * len(self.steps)
        values = [value if math.isfinite(value) else None for value in stored]
        return values + [None] * (len(self.steps) - len(values))

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric wherever it has a finite value."""
        return [(step, value) for step, value in zip(self.steps, self.column(name), strict=True) if value is not None]

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        return next((value for value in reversed(self.column(name)) if value is not None), None)

    def _take(self, line: bytes, offset: int) -> bool:
        metrics = json_object(line)
        step = metrics.pop("step", None) if metrics else None
        if metrics is None or not isinstance(step, int) or isinstance(step, bool):
            return False
        row = len(self.steps)
        self.steps.append(step)
        for name, value in metrics.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                column = self._columns.get(name)
                if column is None:
                    column = self._columns[name] = array("d")
                if len(column) < row:
                    column.extend([MISSING] * (row - len(column)))
                column.append(_double(value))
        return True

    def _clear(self) -> None:
        self.steps.clear()
        self._columns.clear()


def _double(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # JSON's integers have no limit
        return MISSING
