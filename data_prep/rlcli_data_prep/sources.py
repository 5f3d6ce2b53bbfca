"""Read raw rows from a local folder, a file or the hub, each with its location.

An error in a single row does not stop a reader: a line that is not JSON also gives a row, with its `problem`.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from rlcli.errors import DataError
from rlcli.support.reading import (
    DATA_BYTES,
    DATA_LINE_BYTES,
    ENCODING_BYTES,
    bounded_lines,
    check_encoding,
    check_regular,
    not_utf8,
)
from rlcli.types import ConvertOptions, RawRow

ENDINGS = (
    *(".jsonl", ".jsonl.gz", ".json", ".json.gz"),
    *(".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".arrow"),
)
_KINDS = ", ".join(ENDINGS)
SOURCE_HELP = f"a hub id, or a local folder or file ({_KINDS})"

# Words in a name that give its split: `math_test_5000.jsonl.gz`, `data/train-00000-of-00001.parquet`.
_WORDS = {
    "train": ("train", "training"),
    "test": ("test",),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_REVISION = re.compile(r"hf://datasets/[^@]+@(\w+)/")
_SHARD = re.compile(r"-\d+-of-\d+(?=\.)")
SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
"""Files that `save_to_disk` of `datasets` writes beside the rows, which are in .arrow files."""
ROWS_AT_ONCE = 256


def read_splits(
    options: ConvertOptions, hub_id: str, config: str | None = None, *, split: str = "train", join: bool = False
) -> dict[str, Iterator[RawRow]]:
    """The rows of the train and test splits, lazily, from `--source` or, if not given, from `hub_id`.

    config: the hub's name of the wanted part (`--subset` overrides it); in a local folder, the subfolder of that name
    if there is one. join: if no part is named and there are several, take all. split: for a source that gives none. A
    validation split is used as the test split if there is no other. Raises `DataError`.
    """
    parts = list(_parts(options, hub_id, config, join))
    known = {name: [rows for part, rows in parts if _split_of(part) == name] for name in _WORDS}
    if not any(known.values()):
        if len({_SHARD.sub("", part) for part, _ in parts}) > 1:
            names = ", ".join(part for part, _ in parts[:8])
            raise DataError(
                f"{options.source or hub_id} does not mark its train and test files (it holds {names})",
                "give one file as --source, or name the files after their split, e.g. train.jsonl and test.jsonl",
            )
        return {split: chain.from_iterable(rows for _, rows in parts)}
    splits = {"train": known["train"], "test": known["test"] or known["validation"]}
    return {name: chain.from_iterable(rows) for name, rows in splits.items() if rows}


def read_all(
    options: ConvertOptions, hub_id: str, config: str | None = None, *, name: str, join: bool = False
) -> Iterator[RawRow]:
    """Like `read_splits`, but all rows of any split. name: if a folder holds files with this name (`math500.jsonl.gz`
    for "math500"), only these are read."""
    parts = list(_parts(options, hub_id, config, join))
    matching = [rows for part, rows in parts if name in re.sub(r"[^a-z0-9]", "", part.lower())]
    return chain.from_iterable(matching or [rows for _, rows in parts])


def text(row: Mapping[str, Any], *columns: str) -> str:
    """The text in the first of `columns` that is not None; `DataError` if it is not text or is empty."""
    column, value = first(row, *columns)
    return text_of(value, column, "" if column in row else f"the row has {', '.join(map(str, row)) or 'nothing'}")


def text_of(value: Any, column: str, lacking: str = "") -> str:
    """A column's value; `DataError` if it is not text or is empty. lacking: why there is no value."""
    if isinstance(value, str) and value.strip():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DataError(f"'{column}' holds an unpaired surrogate: {value!a:.80}", "fix that row") from None
        return value
    has = lacking or f"it holds {value!r:.80}"
    raise DataError(f"no text in column '{column}' ({has})", "fix that row, or give a source with that column")


def first(row: Mapping[str, Any], *columns: str) -> tuple[str, Any]:
    """The first of `columns` whose value is not None, and its value; else the first column's name and None."""
    return next(((column, row[column]) for column in columns if row.get(column) is not None), (columns[0], None))


def read_file(file: Path) -> Iterator[RawRow]:
    """The rows of one file, lazily. Raises `DataError` if the file cannot be read or has no rows."""
    readers: dict[str, Callable[[Path], Iterator[tuple[Any, str]]]] = {
        **{".parquet": _parquet, ".arrow": _arrow, ".csv": _csv, ".tsv": partial(_csv, delimiter="\t")},
        **{".jsonl": _lines, ".json": _json},
    }
    kind = next(suffix for suffix in reversed(file.suffixes) if suffix in readers)
    count = 0
    with _readable(file):
        for value, where in readers[kind](file):
            count += 1
            yield _raw(value, f"{file.name}, {where}", str(file))
    if not count:
        raise DataError(f"{file} has no rows", "check that the file is complete")


def from_hub(hub_id: str, config: str | None) -> dict[str, Iterator[RawRow]]:
    """The rows of each split of a hub dataset, by the split's name. Raises `DataError`."""
    import datasets

    with _reachable(hub_id):
        loaded = datasets.load_dataset(hub_id, config)
    return {str(split): _dataset_rows(hub_id, str(split), loaded[split]) for split in loaded}


def _parts(
    options: ConvertOptions, hub_id: str, config: str | None, join: bool
) -> Iterable[tuple[str, Iterator[RawRow]]]:
    """Each file of the local source, or each split of the hub dataset, by a name that may contain its split."""
    source = options.source or hub_id
    path = Path(source).expanduser()
    if options.source and (path.exists() or not _HUB_ID.fullmatch(source) or source.endswith(ENDINGS)):
        part = options.subset or config
        folder = path / part if part and (path / part).is_dir() else path
        return [(_inside(file, folder), read_file(file)) for file in _data_files(folder)]
    return [part for name in _configs(options, source, config, join) for part in from_hub(source, name).items()]


def _configs(options: ConvertOptions, hub_id: str, config: str | None, join: bool) -> Sequence[str | None]:
    """The parts of a hub dataset to read: queries the hub if neither the user nor the converter names one."""
    if options.subset:
        return [options.subset]
    if not options.source and not join:
        return [config]
    import datasets

    with _reachable(hub_id):
        names = list(datasets.get_dataset_config_names(hub_id))
    if config in names:
        return [config]
    if len(names) > 1 and not join:
        raise DataError(f"{hub_id} has several parts: {', '.join(names[:20])}", "choose one with --subset")
    return names


def _data_files(source: Path) -> list[Path]:
    if source.is_file() and source.name.endswith(ENDINGS):
        return [source]
    if not source.is_dir():
        problem = "not a file of rows" if source.is_file() else "no such file or folder"
        raise DataError(f"--source: {problem}: {source}", f"give a folder, a hub id, or a file of rows ({_KINDS})")
    # Skip hidden folders: `hf download --local-dir` leaves a .cache, git a .git.
    visible = [file for file in sorted(source.rglob("*")) if "/." not in f"/{_inside(file, source)}" and file.is_file()]
    files = _without_records([file for file in visible if file.name.endswith(ENDINGS)])
    if not files:
        names = ", ".join(file.name for file in visible[:8]) or "nothing"
        raise DataError(
            f"--source: {source} holds no file of rows (it holds {names})", f"give a file of rows ({_KINDS})"
        )
    return files


def _without_records(files: list[Path]) -> list[Path]:
    """The files without what `datasets` writes beside rows in .arrow files: records, and caches of `map`."""
    folders = {file.parent for file in files if file.suffix == ".arrow"}
    saved = {file.parent for file in files if file.name == "state.json"} & folders
    above = folders | {folder.parent for folder in folders}
    return [
        file
        for file in files
        if not (file.name in SAVED and file.parent in above)
        and not (file.suffix == ".arrow" and file.name.startswith("cache-") and file.parent in saved)
    ]


def _inside(file: Path, folder: Path) -> str:
    return file.name if file == folder else file.relative_to(folder).as_posix()


def _split_of(name: str) -> str | None:
    """The split named in a path, the last part of the path first."""
    for part in reversed(name.split("/")):
        for word in re.split(r"[^a-z]+", part.lower()):
            for split, words in _WORDS.items():
                if word in words:
                    return split
    return None


def _dataset_rows(hub_id: str, split: str, dataset: Any) -> Iterator[RawRow]:
    sums = getattr(dataset.info, "download_checksums", None) or {}
    revision = next((match[1] for match in map(_REVISION.match, sums) if match), "")
    origin = f"{hub_id}@{revision[:12]}" if revision else hub_id
    features = str(dataset.features)
    # As Arrow, images stay encoded, and a float32 differs from a double.
    as_arrow = "Image(" in features or "float32" in features or "float16" in features
    rows = (_table_rows(table)[0] for table in dataset.with_format("arrow")) if as_arrow else dataset
    for number, values in enumerate(rows):
        yield RawRow(values, f"{hub_id}, split {split}, {_row(number)}", origin)


@contextmanager
def _reachable(hub_id: str) -> Iterator[None]:
    try:
        yield
    # The hub's client raises errors of its layers (requests, httpx, its own); to the user all mean the same.
    except Exception as error:
        folder = hub_id.rpartition("/")[2]
        raise DataError(
            f"{hub_id} cannot be loaded from the Hugging Face hub: {_brief(error)}",
            "check the name (a hub id or an existing folder) and the network; or download it on a connected machine "
            f"(hf download {hub_id} --repo-type dataset --local-dir {folder}) and give that folder: --source {folder}",
        ) from error


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"{file} cannot be read: {not_utf8(error)}", "then give that file") from error
    # pyarrow's errors are ValueErrors; gzip raises EOFError for a truncated file, zlib.error for a damaged one.
    except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:
        raise DataError(f"{file} cannot be read: {_brief(error)}", "check that the file is complete") from error


def _open(file: Path) -> BinaryIO:
    """A file of text, which is not in an encoding other than UTF-8 by its beginning."""
    check_regular(file, links=True)
    opened: Any = gzip.open(file) if file.suffix == ".gz" else file.open("rb")  # noqa: SIM115 - the caller closes it
    try:
        check_encoding(opened.peek(ENCODING_BYTES)[:ENCODING_BYTES], file)
    except BaseException:
        opened.close()
        raise
    return cast(BinaryIO, opened)


def _lines(file: Path) -> Iterator[tuple[Any, str]]:
    with _open(file) as lines:
        # Bytes, not text: JSON strings may hold characters like U+2028, which must not end a line here.
        for number, line in enumerate(bounded_lines(lines, file, DATA_LINE_BYTES), start=1):
            if line.strip():
                yield _parsed(line.removeprefix(codecs.BOM_UTF8)), f"line {number}"


def _json(file: Path) -> Iterator[tuple[Any, str]]:
    """A list of rows, a single row, or lines as in .jsonl."""
    with _open(file) as opened:
        content = opened.read(DATA_BYTES + 1).removeprefix(codecs.BOM_UTF8)
    if len(content) > DATA_BYTES:
        raise ValueError(
            f"it has more than {DATA_BYTES >> 30} GiB of JSON; give JSON Lines (.jsonl), which are streamed"
        )
    document = _parsed(content)
    if isinstance(document, ValueError):
        if content.lstrip().startswith(b"["):
            raise document
        yield from _lines(file)
        return
    rows = document if isinstance(document, list) else [document]
    yield from ((row, _row(number)) for number, row in enumerate(rows))


def _csv(file: Path, delimiter: str = ",") -> Iterator[tuple[Any, str]]:
    csv.field_size_limit(DATA_LINE_BYTES)
    with _open(file) as opened:
        content = io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")
        reader = csv.DictReader(_text_lines(content), delimiter=delimiter)
        for row in reader:
            extra_fields = ValueError(f"more fields than the header's {len(row) - 1}")
            yield (extra_fields if None in row else row), f"line {reader.line_num}"


def _text_lines(text: io.TextIOWrapper) -> Iterator[str]:
    """The lines of a text file, none longer than a line of JSON may be."""
    while line := text.readline(DATA_LINE_BYTES + 1):
        if len(line) > DATA_LINE_BYTES:
            raise ValueError(f"it has a line of more than {DATA_LINE_BYTES >> 20} MiB")
        yield line


def _parquet(file: Path) -> Iterator[tuple[Any, str]]:
    import pyarrow.parquet

    check_regular(file, links=True)
    yield from _numbered(pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=ROWS_AT_ONCE))


def _arrow(file: Path) -> Iterator[tuple[Any, str]]:
    """The rows of an Arrow file: a stream, as `datasets` writes it, or a file with random access (Feather)."""
    import pyarrow

    check_regular(file, links=True)
    with pyarrow.memory_map(str(file)) as content:
        try:
            batches: Any = pyarrow.ipc.open_stream(content)
        except pyarrow.ArrowInvalid:
            content.seek(0)
            opened = pyarrow.ipc.open_file(content)
            batches = map(opened.get_batch, range(opened.num_record_batches))
        yield from _numbered(part for batch in batches for part in _valid_parts(batch))


def _valid_parts(batch: Any) -> Iterator[Any]:
    """A record batch in slices of few rows. Raises ValueError if its offsets lead out of its buffers: the file's
    reader trusts them."""
    batch.validate(full=True)
    return (batch.slice(start, ROWS_AT_ONCE) for start in range(0, batch.num_rows, ROWS_AT_ONCE))


def _numbered(batches: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    rows = (row for batch in batches for row in _table_rows(batch))
    yield from ((row, _row(number)) for number, row in enumerate(rows))


def _table_rows(table: Any) -> list[dict[str, Any]]:
    """The rows of a table or record batch of Arrow. A float32 becomes the float of its shortest text: 0.1, not
    0.10000000149."""
    rows: list[dict[str, Any]] = table.to_pylist()
    for field in table.schema:
        if _has_short_floats(field.type):
            for row in rows:
                row[field.name] = _widened(row[field.name], field.type)
    return rows


def _has_short_floats(kind: Any) -> bool:
    import pyarrow.types as kinds

    kind = _decoded(kind)
    if kinds.is_float16(kind) or kinds.is_float32(kind):
        return True
    return any(_has_short_floats(kind.field(index).type) for index in range(kind.num_fields))


def _decoded(kind: Any) -> Any:
    """The type of the values of a column that is encoded by a dictionary or by runs; any other type as it is."""
    import pyarrow.types as kinds

    while kinds.is_dictionary(kind) or kinds.is_run_end_encoded(kind):
        kind = kind.value_type
    return kind


def _widened(value: Any, kind: Any) -> Any:
    import numpy as np
    import pyarrow.types as kinds

    kind = _decoded(kind)
    if kinds.is_float16(kind) or kinds.is_float32(kind):
        short = np.float16 if kinds.is_float16(kind) else np.float32
        return value if value is None else float(str(short(value)))
    if value is None or not _has_short_floats(kind):
        return value
    if kinds.is_struct(kind):
        return {field.name: _widened(value[field.name], field.type) for field in kind}
    if kinds.is_map(kind):
        return [(key, _widened(item, kind.item_type)) for key, item in value]
    return [_widened(item, kind.value_type) for item in value] if isinstance(value, list) else value


def _parsed(content: bytes) -> Any:
    """The parsed JSON, or the error."""
    try:
        return json.loads(content.decode().rstrip())
    except UnicodeDecodeError as error:
        return ValueError(not_utf8(error))
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return ValueError(f"not JSON: {error.msg:.100} ({line}character {error.colno})")
    except ValueError as error:
        return ValueError(f"not JSON: {error!s:.120}")
    except RecursionError:
        return ValueError("not a valid JSON row: nested too deep")


def _raw(value: Any, where: str, origin: str) -> RawRow:
    if isinstance(value, list):  # columns "0", "1", …, as in pandas and `datasets`
        value = {str(number): item for number, item in enumerate(value)}
    if isinstance(value, dict):
        return RawRow(value, where, origin)
    return RawRow({}, where, origin, str(value) if isinstance(value, ValueError) else f"not an object: {value!r:.80}")


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _row(number: int) -> str:
    return f"row {number} (the first is 0)"
