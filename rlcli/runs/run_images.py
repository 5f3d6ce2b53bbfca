"""Finds the images of a run: those of its prompts in the data that it was started with, if that is unchanged.

A run saves only the digests of these. So the pages read the row of a prompt from the data, and show an image of it only
if its digest is the one that the run recorded. Of images from environments, a step's folder has small copies.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.data import step_images
from rlcli.data.prompts.image_columns import image_column
from rlcli.data.prompts.prompt_table import find_file
from rlcli.errors import DataError
from rlcli.images.row_images import BadImage, load_images
from rlcli.runs.listing import config_of
from rlcli.runs.software_record import directory_of, environment_of
from rlcli.types import image_digest

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_ID = re.compile(r":(train|test):(\d{1,15})\Z")
"""The end of a prompt's id: split and row."""
_STEP = re.compile(r"(samples|evaluations)/step-\d{6,15}")
ROWS_AT_ONCE = 16
BUFFER = 1 << 20
"""Bytes that are read ahead; otherwise all images of a row group are."""


def where_of(kind: str, step: int) -> str:
    """The folder of a step's samples, within the run's.

    >>> where_of("samples", 12)
    'samples/step-000012'
    """
    return f"{kind}/step-{step:06d}"


class RunImages:
    """The images of the run in a folder."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def find(self, wanted: Mapping[str, str]) -> Iterator[tuple[str, bytes | str]]:
        """Yield each image in `wanted` in any order: its digest and the encoded image as `bytes`, or a `str` with the
        reason why it is not available. wanted: digest → a prompt that has the image, or the step in which an
        environment showed it (`where_of`)."""
        rows: dict[str, dict[int, list[str]]] = {}
        steps: dict[str, list[str]] = {}
        for digest, prompt in wanted.items():
            if _STEP.fullmatch(prompt):
                steps.setdefault(prompt, []).append(digest)
            elif match := _ID.search(prompt, max(0, len(prompt) - 32)):
                rows.setdefault(match[1], {}).setdefault(int(match[2]), []).append(digest)
            else:
                yield digest, f"the prompt {prompt:.100} is of no file"
        for split, of_split in rows.items():
            yield from self._of_split(split, of_split)
        for step, digests in steps.items():
            copies = dict(step_images.read_images(self.run / step, digests))
            yield from ((digest, copies.get(digest, f"{step} has no copy of it")) for digest in digests)

    def _of_split(self, split: str, rows: Mapping[int, list[str]]) -> Iterator[tuple[str, bytes | str]]:
        """rows: row → digests. A run with several sets has them in any of its files."""
        missing = {digest: row for row, digests in rows.items() for digest in digests}
        files = self._files(split)
        why = "" if files else "config.toml names no data"
        for shown, path in files:
            try:
                for row, images in read_images(find_file(path, split), set(missing.values())):
                    for image in images:
                        if missing.get(digest := image_digest(image)) == row:
                            del missing[digest]
                            yield digest, image
            except (DataError, OSError) as error:
                problem = error.message if isinstance(error, DataError) else f"{shown}: {error.strerror or error}"
                why = why or problem.replace(str(path), shown).removeprefix("data: ")
            if not missing:
                return
        why = why or f"no longer in {', '.join(shown for shown, _ in files)}"
        yield from ((digest, why) for digest in missing)

    def _files(self, split: str) -> list[tuple[str, Path]]:
        """The data files of a split: each path as the configuration has it, and resolved."""
        section, key = ("data", "path") if split == "train" else ("evaluation", "data")
        value = config_of(self.run).get(section, {}).get(key)
        datasets = value if isinstance(value, list) else [value]
        paths = [dataset.get("path") if isinstance(dataset, dict) else dataset for dataset in datasets]
        base = directory_of(environment_of(self.run)) or Path.cwd()
        return [(path, base / os.path.expanduser(path)) for path in paths if isinstance(path, str) and path]


def read_images(file: Path, rows: set[int]) -> Iterator[tuple[int, tuple[bytes, ...]]]:
    """The encoded images of these rows of a parquet file, row by row; none for a row whose image is missing. Reads the
    row groups that have such rows, a few rows at a time. DataError if the file cannot be read."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file, buffer_size=BUFFER) as parquet:
            column = image_column(parquet.schema_arrow)
            first = 0
            for number in range(parquet.metadata.num_row_groups if column else 0):
                count = parquet.metadata.row_group(number).num_rows
                group_rows = sorted(row - first for row in rows if first <= row < first + count)
                for index, value in _values(parquet, number, column, group_rows):
                    yield first + index, _images(value, file.parent)
                first += count
    except (OSError, pyarrow.ArrowException, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is damaged or incomplete"
        raise DataError(f"{file} cannot be read: {why}", "check that the file is whole") from error


def _values(parquet: ParquetFile, group: int, column: str, rows: list[int]) -> Iterator[tuple[int, object]]:
    """The values of a column in these rows of a row group, ascending."""
    if not rows:
        return
    start = 0
    for batch in parquet.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[column]):
        for row in [row for row in rows if start <= row < start + len(batch)]:
            yield row, batch.column(0)[row - start].as_py()
        start += len(batch)
        if start > rows[-1]:
            return


def _images(value: object, folder: Path) -> tuple[bytes, ...]:
    try:
        return load_images(value, folder)
    except BadImage:
        return ()
