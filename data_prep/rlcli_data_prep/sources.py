"""Raw rows, from a local folder or file or from the hub."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcli.errors import DataError

Row = dict[str, Any]
SPLITS = ("train", "test")
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


def read_splits(source: str | None, hub_id: str, hub_config: str) -> dict[str, list[Row]]:
    """The rows of each split: of the local `source` where it is given, else of the hub's dataset.

    Locally a file's split is the one that its name holds as a word (`train.jsonl.gz`, `test-00000-of-00001.parquet`);
    several files of one split are joined in the order of their names. Raises `DataError`.
    """
    if source is None:
        return _from_hub(hub_id, hub_config)
    files = _split_files(Path(source).expanduser())
    return {split: [row for file in files[split] for row in read_file(file)] for split in SPLITS if files[split]}


def read_file(file: Path) -> list[Row]:
    """The rows of one .jsonl, .json (a list, or lines) or .parquet file; the first two also as .gz."""
    try:
        if file.name.endswith(".parquet"):
            import pyarrow.parquet

            rows: list[Any] = pyarrow.parquet.ParquetFile(file).read().to_pylist()
        else:
            content = file.read_bytes()
            rows = _parse(file, gzip.decompress(content) if file.suffix == ".gz" else content)
    # pyarrow's errors are ValueErrors; gzip says EOFError of a file cut short, zlib.error of one that is damaged.
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {error!s:.200}", "check that the file is whole") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{file}, row {number} (the first is 0): not an object: {row!r:.80}", "mend that row")
    if not rows:
        raise DataError(f"{file} has no rows", "check that the file is whole")
    return rows


def _parse(file: Path, content: bytes) -> list[Any]:
    text = content.decode("utf-8")
    if ".jsonl" not in file.suffixes and text.lstrip().startswith("["):
        return list(json.loads(text))
    rows = []
    # Not splitlines: JSON strings may hold U+2028 and its like as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON: {error}") from error
    return rows


def _split_files(source: Path) -> dict[str, list[Path]]:
    if not source.is_file() and not source.is_dir():
        raise DataError(f"--source: no such file or folder: {source}", "give a folder that holds train and test files")
    among = [source] if source.is_file() else sorted(source.iterdir())
    files = [file for file in among if file.is_file() and file.name.endswith(ENDINGS)]
    found = {split: [file for file in files if split in re.split(r"[^a-z]+", file.name.lower())] for split in SPLITS}
    if not any(found.values()):
        names = ", ".join(file.name for file in among[:8]) or "nothing"
        raise DataError(
            f"--source: {source} holds no file of a split (it holds {names})",
            f"name the files after their split, e.g. train.jsonl and test.jsonl ({', '.join(ENDINGS)})",
        )
    return found


def _from_hub(hub_id: str, config: str) -> dict[str, list[Row]]:
    import datasets

    try:
        loaded = datasets.load_dataset(hub_id, config)
    # The hub's client raises what its layers raise (requests, httpx, its own); to the user all mean the same.
    except Exception as error:
        raise DataError(
            f"{hub_id} ({config}) cannot be had from the Hugging Face hub: {error!s:.200}",
            "check the network, or give a local copy with --source",
        ) from error
    return {split: list(loaded[split]) for split in SPLITS if split in loaded}


def text_of(row: Row, column: str, split: str, number: int, columns: Sequence[str]) -> str:
    """`row[column]` as text, or a `DataError` that names the row. columns: all that the converter reads."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        has = f"it has {', '.join(row)}" if column not in row else f"it holds {value!r:.80}"
        raise DataError(
            f"{split}, row {number} (the first is 0): no text in column '{column}' ({has})",
            f"the source must have the columns {', '.join(columns)}",
        )
    return value
