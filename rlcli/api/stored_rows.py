"""Stores a program's rows (a `datasets.Dataset`, a pandas frame, a list of dicts) as a parquet file, so that a resumed
run finds them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.api.function_verifier import make_run_folder, remove_stored
from rlcli.errors import ConfigError, DataError
from rlcli.runs.listing import config_of

if TYPE_CHECKING:
    from rlcli.types import Prompt

DATA = "data"
"""Folder of such rows, in the folder of a run or an evaluation."""


def is_rows(data: object) -> bool:
    """True if data are rows, and not paths. Raises `ConfigError` for a dict of datasets.

    >>> is_rows([{"prompt": "1+1=", "answer": "2"}]), is_rows(["data/gsm8k"]), is_rows({"data/gsm8k": 2.0})
    (True, False, False)
    """
    if isinstance(data, Mapping) and any(map(is_rows, data.values())):
        names = ", ".join(map(str, data))
        raise ConfigError(f"data is a dict of datasets ({names})", "give one: data=DATASET['train']")
    if data is None or isinstance(data, str | os.PathLike | Mapping):
        return False
    if hasattr(data, "column_names") or hasattr(data, "iterrows"):
        return True
    return isinstance(data, Sequence) and bool(data) and all(isinstance(row, Mapping) for row in data)


@contextmanager
def stored_rows(rows_by_name: Mapping[str, Any], run: Path, force: bool) -> Iterator[dict[str, str]]:
    """Store rows in the folder of a run that the block starts; yields the path of each. rows_by_name: file name, such
    as `train` → rows.

    If the block fails before there is a run that names them, the folder is restored. force: the run may replace one.
    Raises `DataError` for a row that has no prompt, before anything is written.
    """
    prepared = {name: _prepared(name, rows) for name, rows in rows_by_name.items()}
    new_folders = make_run_folder(run, force)
    files = {name: _free(run.absolute() / DATA, name) for name in prepared}
    try:
        _write(prepared, files)
        yield {name: str(file) for name, file in files.items()}
    except BaseException:
        config = str(config_of(run))
        if not any(str(file) in config for file in files.values()):
            for file in files.values():
                remove_stored(file, run / DATA, new_folders)
        raise


@contextmanager
def stored_evaluation_rows(rows: Any, folder: Path) -> Iterator[str]:
    """Store rows in the folder of an evaluation; yields the path."""
    prepared, file = _prepared("test", rows), folder.absolute() / DATA / "test.parquet"
    _write({"test": prepared}, {"test": file})
    yield str(file)


def _free(folder: Path, name: str) -> Path:
    """NAME.parquet, or NAME-2.parquet and so on: a run that uses the former may still resume."""
    file, number = folder / f"{name}.parquet", 2
    while file.exists():
        file, number = folder / f"{name}-{number}.parquet", number + 1
    return file


def _prepared(name: str, rows: Any) -> Sequence[Prompt]:
    """The prompts of rows, converted as by `rlcli prep jsonl`."""
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.types import ConvertOptions, RawRow

    raw = (RawRow(dict(row), f"row {number} of the data") for number, row in enumerate(_dicts(rows)))
    converter = replace(converter_named("jsonl"), read=lambda options: {name: raw})
    try:
        return prepare(converter, ConvertOptions(source="dataset")).splits[name]
    except DataError as error:
        hint = "rename its columns to prompt and answer, or write it to a file and use rlcli prep jsonl --columns"
        raise DataError(error.message, hint) from error


def _dicts(rows: Any) -> Iterable[Mapping[str, Any]]:
    if hasattr(rows, "iterrows"):  # a pandas frame
        return (row.to_dict() for _, row in rows.iterrows())
    if "Image(" in str(getattr(rows, "features", "")):  # `datasets` would decode images; as Arrow, they stay encoded
        return (row.to_pylist()[0] for row in rows.with_format("arrow"))
    listed: Iterable[Mapping[str, Any]] = rows
    return listed


def _write(prepared: Mapping[str, Sequence[Prompt]], files: Mapping[str, Path]) -> None:
    from rlcli.prep.split_writer import write_files

    write_files({files[name]: prompts for name, prompts in prepared.items()})
