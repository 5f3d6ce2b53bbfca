"""Rows in a temporary file: a dataset of any size is read, filtered and written with the memory of a few rows."""

from __future__ import annotations

import os
import pickle
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, overload

import numpy as np

from rlcli.errors import DataError
from rlcli.types import Prompt

if TYPE_CHECKING:
    from jaxtyping import Int64

TRAIN, TEST = "train", "test"
CHUNK_ROWS, CHUNK_BYTES = 1 << 14, 32 << 20
"""Rows and bytes that `chunks` holds at once, at most; a single row may have more bytes."""
_READ_ROWS = 512
_FIELDS = tuple(field.name for field in fields(Prompt))


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
        """Append a row; returns its number."""
        prompt = row.prompt
        self.has_images = self.has_images or bool(prompt.images)
        content = pickle.dumps((row.where, *(getattr(prompt, name) for name in _FIELDS)), pickle.HIGHEST_PROTOCOL)
        with _writing():
            self._file.write(content)
        self.starts.append(self.starts[-1] + len(content))
        return len(self) - 1

    def read(self, first: int, last: int) -> list[Row]:
        """The rows from number `first` to before `last`."""
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
    """Rows of a store, in any order. rows: their numbers in the store. held_out: they were taken from train, and are
    for testing."""

    def __init__(self, store: RowStore, rows: Int64[np.ndarray, " rows"], *, held_out: bool = False) -> None:
        self._store, self._rows, self._held_out = store, rows, held_out

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> StoredRows: ...
    def __getitem__(self, index: int | slice) -> Row | StoredRows:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        row = int(self._rows[index])
        return self._shown(self._store.read(row, row + 1)[0])

    def __iter__(self) -> Iterator[Row]:
        for start, end in self.runs(_READ_ROWS):
            yield from self._read(start, end)

    def take(self, indexes: Int64[np.ndarray, " indexes"] | Sequence[int]) -> StoredRows:
        """The rows at these positions, in the order of `indexes`."""
        selected = self._rows[np.asarray(indexes, np.int64)]
        return StoredRows(self._store, selected, held_out=self._held_out)

    def as_test(self) -> StoredRows:
        """The same rows, for testing."""
        return StoredRows(self._store, self._rows, held_out=True)

    @property
    def has_images(self) -> bool:
        """True if any row has images."""
        return self._store.has_images and any(row.prompt.images for row in self)

    def chunks(self) -> Iterator[list[Row]]:
        """All rows, a bounded number at once."""
        for start, end in self.runs():
            yield list(self._read(start, end))

    def runs(self, most_rows: int = 0) -> Iterator[tuple[int, int]]:
        """Ranges of positions of at most `most_rows` (0: CHUNK_ROWS) and CHUNK_BYTES, or of a single row."""
        most_rows = most_rows or CHUNK_ROWS
        starts = np.frombuffer(self._store.starts, np.int64)
        for start in range(0, len(self), most_rows):
            rows = self._rows[start : start + most_rows]
            total = np.cumsum(starts[rows + 1] - starts[rows])
            low, bytes_before = 0, 0
            while low < len(rows):
                high = max(low + 1, int(total.searchsorted(bytes_before + CHUNK_BYTES, side="right")))
                yield start + low, start + high
                low, bytes_before = high, int(total[high - 1])

    def _read(self, start: int, end: int) -> Iterator[Row]:
        """The rows from position `start` to before `end`, those that follow each other in the store by one read."""
        rows = self._rows[start:end]
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        for low, high in zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True):
            yield from map(self._shown, self._store.read(int(rows[low]), int(rows[high - 1]) + 1))

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
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> StoredPrompts: ...
    def __getitem__(self, index: int | slice) -> Prompt | StoredPrompts:
        return StoredPrompts(self._rows[index]) if isinstance(index, slice) else self._rows[index].prompt

    def __iter__(self) -> Iterator[Prompt]:
        return (row.prompt for row in self._rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    @property
    def has_images(self) -> bool:
        """True if any prompt has images."""
        return self._rows.has_images

    def chunks(self) -> Iterator[list[Prompt]]:
        """All prompts, a bounded number at once."""
        return ([row.prompt for row in rows] for rows in self._rows.chunks())

    @property
    def are_many(self) -> bool:
        """True if `chunks` yields more than one."""
        chunks = self._rows.runs()
        return next(chunks, None) is not None and next(chunks, None) is not None


def chunks_of(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """All prompts, a bounded number at once; prompts that are in memory already as one chunk."""
    return prompts.chunks() if isinstance(prompts, StoredPrompts) else iter([list(prompts)])


def are_chunked(prompts: Sequence[Prompt]) -> bool:
    """True if `chunks_of` yields more than one."""
    return isinstance(prompts, StoredPrompts) and prompts.are_many


def have_images(prompts: Sequence[Prompt]) -> bool:
    """True if any of them has images."""
    return prompts.has_images if isinstance(prompts, StoredPrompts) else any(prompt.images for prompt in prompts)
