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

    take: False for a line that is damaged; `skipped` counts them. cut: whether the last line is incomplete: the run was
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
        """Read what was added since the last call; whether anything was. Never raises for a damaged file, only
        `UnfitFile`."""
        try:
            now = check_regular(self.path)
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
        name, are = self.path.name, "line is" if self.skipped == 1 else "lines are"
        found = [f"{name} cannot be read: {self.error}"] if self.error else []
        if self.skipped:
            found.append(f"{name}: {self.skipped} {are} damaged and left out")
        return [*found, *([f"{name}: the last line is incomplete and left out"] if self.cut else [])]

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
    """The objects of a file of JSON lines, in `found`."""

    def __init__(self, path: Path) -> None:
        self.found: list[dict[str, Any]] = []
        self.file = GrowingFile(path, self._take, self.found.clear)

    def _take(self, line: bytes, offset: int) -> bool:
        found = json_object(line)
        if found is not None:
            self.found.append(found)
        return found is not None


class Timeline:
    """timeline.jsonl: only the places of its lines are kept, since a line has every span of every worker."""

    def __init__(self, path: Path) -> None:
        self._places: dict[int, tuple[int, int]] = {}
        self.file = GrowingFile(path, self._take, self._places.clear)

    def steps(self) -> list[int]:
        """The steps that have a line, ascending."""
        return sorted(self._places)

    def line(self, step: int) -> dict[str, Any] | None:
        """The line of a step; None if there is none, or it is damaged."""
        if (place := self._places.get(step)) is None:
            return None
        try:
            with opened(self.file.path) as file:
                file.seek(place[0])
                return json_object(file.read(place[1]))
        except OSError:
            return None

    def _take(self, line: bytes, offset: int) -> bool:
        found = _STEP.search(line[:200])
        step = int(found[1]) if found and line.rstrip().endswith(b"}") else None
        if step is not None:
            self._places[step] = (offset, len(line))
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

    def _take(self, line: bytes, offset: int) -> bool:
        found = json_object(line)
        step = found.pop("step", None) if found else None
        if found is None or not isinstance(step, int) or isinstance(step, bool):
            return False
        row = len(self.steps)
        self.steps.append(step)
        for name, value in found.items():
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
