"""Rows in a temporary file: a dataset of any size is read, filtered and written with the memory of a few rows."""

from __future__ import annotations

import os
import pickle
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, overload

import numpy as np

from rlcli.errors import DataError
from rlcli.types import Prompt

TRAIN, TEST = "train", "test"
CHUNK_ROWS, CHUNK_BYTES = 1 << 14, 32 << 20
"""Rows and bytes that `chunks` holds at once, at most; a single row may have more bytes."""
_READ_ROWS = 512
_FIELDS = tuple(one.name for one in fields(Prompt))


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and the location of its raw row."""

    prompt: Prompt
    where: str


class RowStore:
    """Rows in a file without a name, in the folder for temporary files (TMPDIR); memory holds 8 bytes of each.

    It is written first and then read, any number of times. The file is gone with this object, or with the process.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="rlcli-prep-")  # noqa: SIM115 - it lasts as long as this object
        self.starts = array("q", [0])
        self.has_images = False

    def __len__(self) -> int:
        return len(self.starts) - 1

    def add(self, row: Row) -> int:
        """Append a row; returns its place."""
        prompt = row.prompt
        self.has_images = self.has_images or bool(prompt.images)
        content = pickle.dumps((row.where, *(getattr(prompt, name) for name in _FIELDS)), pickle.HIGHEST_PROTOCOL)
        with _writing():
            self._file.write(content)
        self.starts.append(self.starts[-1] + len(content))
        return len(self) - 1

    def read(self, first: int, last: int) -> list[Row]:
        """The rows from place `first` to before place `last`."""
        with _writing():
            self._file.flush()
        start, end = self.starts[first], self.starts[last]
        content = memoryview(_read_all(self._file.fileno(), end - start, start))
        return [_row(content[self.starts[i] - start : self.starts[i + 1] - start]) for i in range(first, last)]


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the rows cannot be kept in {tempfile.gettempdir()}: {error.strerror or error}",
            "set TMPDIR to a folder with free space",
        ) from error


def _read_all(file: int, count: int, start: int) -> bytes:
    """`os.pread`, which returns at most 2 GiB."""
    parts = []
    while count and (part := os.pread(file, count, start)):
        parts.append(part)
        start, count = start + len(part), count - len(part)
    return b"".join(parts) if len(parts) != 1 else parts[0]


def _row(content: memoryview) -> Row:
    where, *values = pickle.loads(content)
    return Row(Prompt(**dict(zip(_FIELDS, values, strict=True))), where)


class StoredRows(Sequence[Row]):
    """Rows of a store, in their own order. places: int64 `[rows]`, their places in the store. held_out: they were taken
    from train, and are for testing."""

    def __init__(self, store: RowStore, places: np.ndarray, *, held_out: bool = False) -> None:
        self._store, self._places, self._held_out = store, places, held_out

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> StoredRows: ...
    def __getitem__(self, place: int | slice) -> Row | StoredRows:
        if isinstance(place, slice):
            return self.take(np.arange(len(self))[place])
        at = int(self._places[place])
        return self._shown(self._store.read(at, at + 1)[0])

    def __iter__(self) -> Iterator[Row]:
        for start, end in self.runs(_READ_ROWS):
            yield from self._read(start, end)

    def take(self, places: np.ndarray | Sequence[int]) -> StoredRows:
        """The rows at these positions, in the order given."""
        chosen = self._places[np.asarray(places, np.int64)]
        return StoredRows(self._store, chosen, held_out=self._held_out)

    def as_test(self) -> StoredRows:
        """The same rows, for testing."""
        return StoredRows(self._store, self._places, held_out=True)

    @property
    def has_images(self) -> bool:
        """Whether any row has pictures."""
        return self._store.has_images and any(row.prompt.images for row in self)

    def chunks(self) -> Iterator[list[Row]]:
        """All rows, a bounded number at once."""
        for start, end in self.runs():
            yield list(self._read(start, end))

    def runs(self, most_rows: int = 0) -> Iterator[tuple[int, int]]:
        """Ranges of positions of at most so many rows (0: `CHUNK_ROWS`) and `CHUNK_BYTES`, or of a single row."""
        most_rows = most_rows or CHUNK_ROWS
        starts = np.frombuffer(self._store.starts, np.int64)
        for start in range(0, len(self), most_rows):
            places = self._places[start : start + most_rows]
            total = np.cumsum(starts[places + 1] - starts[places])
            low, before = 0, 0
            while low < len(places):
                high = max(low + 1, int(total.searchsorted(before + CHUNK_BYTES, side="right")))
                yield start + low, start + high
                low, before = high, int(total[high - 1])

    def _read(self, start: int, end: int) -> Iterator[Row]:
        """The rows from position `start` to before `end`, those that follow each other in the store by one read."""
        places = self._places[start:end]
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        for low, high in zip([0, *breaks.tolist()], [*breaks.tolist(), len(places)], strict=True):
            yield from map(self._shown, self._store.read(int(places[low]), int(places[high - 1]) + 1))

    def _shown(self, row: Row) -> Row:
        prompt = row.prompt
        if not self._held_out or prompt.extra_info.get("split") != TRAIN:
            return row
        index = prompt.id.rpartition(":")[2]
        held_out = replace(
            prompt, id=f"{prompt.data_source}:{TEST}:{index}", extra_info={**prompt.extra_info, "split": TEST}
        )
        return Row(held_out, row.where)


class StoredPrompts(Sequence[Prompt]):
    """The prompts of rows; equal to any sequence of equal prompts."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, rows: StoredRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> StoredPrompts: ...
    def __getitem__(self, place: int | slice) -> Prompt | StoredPrompts:
        return StoredPrompts(self._rows[place]) if isinstance(place, slice) else self._rows[place].prompt

    def __iter__(self) -> Iterator[Prompt]:
        return (row.prompt for row in self._rows)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    @property
    def has_images(self) -> bool:
        """Whether any prompt has pictures."""
        return self._rows.has_images

    def chunks(self) -> Iterator[list[Prompt]]:
        """All prompts, a bounded number at once."""
        return ([row.prompt for row in rows] for rows in self._rows.chunks())

    @property
    def are_many(self) -> bool:
        """Whether `chunks` gives more than one."""
        chunks = self._rows.runs()
        return next(chunks, None) is not None and next(chunks, None) is not None


def chunks_of(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """All prompts, a bounded number at once; those that are in memory already in one piece."""
    return prompts.chunks() if isinstance(prompts, StoredPrompts) else iter([list(prompts)])


def are_chunked(prompts: Sequence[Prompt]) -> bool:
    """Whether `chunks_of` gives more than one."""
    return isinstance(prompts, StoredPrompts) and prompts.are_many


def have_images(prompts: Sequence[Prompt]) -> bool:
    """Whether any of them has pictures."""
    return prompts.has_images if isinstance(prompts, StoredPrompts) else any(prompt.images for prompt in prompts)
