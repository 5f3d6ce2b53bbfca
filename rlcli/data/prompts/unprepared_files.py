"""The errors for data that are not prepared yet (JSON Lines, CSV, a dataset of the hub), with the command to do so."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

from rlcli.errors import DataError
from rlcli.support.reading import BinaryLines, opened

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz", ".arrow")
"""Ends of the names of files that `rlcli prep jsonl` reads besides parquet."""
PROMPTS = ("prompt", "question", "problem", "input", "instruction", "query", "messages", "conversations")
ANSWERS = ("answer", "ground_truth", "solution", "target", "output", "label", "final_answer")
"""Names of columns that probably hold the prompt and the answer, the likelier first."""
LINE_BYTES = 1 << 20
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_other_file(path: Path) -> bool:
    """True if a file has the name of one that `rlcli prep jsonl` reads, other than parquet."""
    return path.name.endswith(ENDINGS)


def unprepared(path: Path, problem: str = "", columns: Iterable[str] = ()) -> DataError:
    """The error for a file or a folder of rows that are not prepared. problem, columns: of its rows, if they are
    known."""
    kind = "is a folder of raw rows" if path.is_dir() else "is not a parquet file that rlcli prep has made"
    folder = f"data/{_stem(path)}"
    command = f"rlcli prep jsonl --source {shlex.quote(str(path))}{_mapping(columns or _columns(path))} --out {folder}"
    return DataError(f"data: {path} {problem or kind}", f"make rows of it: {command}, then give {folder}")


def raw_rows(columns: Iterable[str]) -> bool:
    """True if columns are those of rows that `rlcli prep jsonl` makes prompts of, by their names."""
    return bool({*PROMPTS} & {*columns}) and "reward_model" not in columns


def missing(path: Path) -> DataError:
    """The error for a path where nothing is. It may be meant as the id of a dataset on the hub."""
    text, name = str(path), path.name
    known = {entry.name for entry in entry_points(group="rlcli.data_prep")}
    command = f"rlcli prep {name}" if name in known else "rlcli prep NAME"
    is_local = path.is_absolute() or path.parent.exists() or path.parts[:1] == ("data",)
    if is_local or not _HUB_ID.fullmatch(text) or is_other_file(path) or path.suffix == ".parquet":
        hint = "check its name" if is_other_file(path) else f"make it with: {command} --out {shlex.quote(text)}"
        return DataError(f"data: no such file or folder: {path}", hint)
    dataset = name.lower()
    command = f"rlcli prep {dataset}" if dataset in known else f"rlcli prep hf --source {text} --out data/{name}"
    return DataError(
        f"data: no such file or folder: {path}",
        f"for the dataset of the hub: {command}, then give data/{dataset if dataset in known else name}",
    )


def has_other_files(folder: Path) -> bool:
    """True if a folder holds files that `rlcli prep jsonl` reads, other than parquet."""
    return any(is_other_file(file) for file in folder.iterdir())


def _stem(path: Path) -> str:
    return re.sub(r"[^\w.-]+", "-", path.resolve().name.split(".")[0]).strip("-.") or "rows"


def _mapping(columns: Iterable[str]) -> str:
    """The option that names the columns of the prompt and the answer, as far as their names show."""
    present = list(columns)
    pairs = []
    for ours, names in (("prompt", PROMPTS), ("answer", ANSWERS)):
        theirs = next((name for name in names if name in present), "")
        if theirs and theirs not in (ours, "ground_truth"):
            pairs.append(f"{ours}={theirs}")
    if present and not any(name in present for name in PROMPTS):
        pairs.insert(0, "prompt=COLUMN")
    return f" --columns {','.join(pairs)}" if pairs else ""


def _columns(path: Path) -> list[str]:
    """The columns of the first row of a file of JSON Lines, CSV or TSV; none if they cannot be read."""
    if not path.is_file() or path.suffix in (".json", ".arrow"):
        return []
    try:
        with opened(path, links=True) as file:
            lines: BinaryLines = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            line = lines.readline(LINE_BYTES).decode("utf-8-sig")
        if separator := "," if ".csv" in path.suffixes else "\t" if ".tsv" in path.suffixes else "":
            return [name.strip().strip('"') for name in line.split(separator)]
        row = json.loads(line)
    except (OSError, EOFError, ValueError, RecursionError):
        return []
    return list(row) if isinstance(row, dict) else []
