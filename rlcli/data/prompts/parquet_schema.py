"""The parquet schema that verl reads, so that both programs can read the files.

| column         | type                          | in our files                                            |
|----------------|-------------------------------|---------------------------------------------------------|
| `data_source`  | string                        | the dataset's name, e.g. its hub id                     |
| `prompt`       | list<struct<role, content>>   | the chat messages                                       |
| `ability`      | string                        | e.g. `math`                                             |
| `reward_model` | struct<style, ground_truth>   | `style` is the verifier's name, or `rule`, as in verl's |
| `extra_info`   | struct                        | split, index and all else the converter keeps      |
| `images`       | list<struct<bytes, path>>     | encoded images; only if some row has any               |

Rows whose `extra_info` differ in shape cannot be a parquet struct without loss: they are stored as a struct of one
field, `rlcli_json`, that holds the JSON text. `unpack_extra_info` turns both forms back into the dict.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from rlcli.errors import DataError
from rlcli.support.files import replacing_all
from rlcli.support.reading import parse_json
from rlcli.types import Message, Prompt

if TYPE_CHECKING:
    import pyarrow as pa

IMAGE_ROWS = 32
"""Rows of a row group if they have images: a row takes megabytes, and a page that shows one reads its whole group."""
JSON_FIELD = "rlcli_json"
NO_VERIFIER = "rule"
"""The style of a row that names no verifier, as in verl's files."""


class UnfitStruct(Exception):
    """Values of `extra_info` that would not read back exactly from the type that the column has."""


class RewardModel(TypedDict):
    """The column `reward_model` of a row."""

    style: str
    """Verifier expression, or `NO_VERIFIER`."""
    ground_truth: str
    """Reference answer."""


class PromptRow(TypedDict):
    """One parquet row of prompts, before it is written."""

    data_source: str
    """Name of the dataset."""
    prompt: list[dict[str, str]]
    """Chat messages."""
    ability: str
    """Kind of task."""
    reward_model: RewardModel
    """Scoring of a response."""
    extra_info: dict[str, object]
    """Further fields of the row: JSON values."""
    images: NotRequired[list[bytes]]
    """Encoded images, one for each `<image>` in the messages."""


def row(
    *,
    data_source: str,
    messages: Sequence[Message],
    verifier: str,
    ground_truth: str,
    ability: str = "math",
    extra_info: Mapping[str, object] | None = None,
    images: Sequence[bytes] = (),
) -> PromptRow:
    """One parquet row, as `write_rows` takes it. images: encoded, one for each `<image>` in the messages.

    >>> r = row(data_source="toy", messages=[{"role": "user", "content": "1+1="}], verifier="gsm8k", ground_truth="2")
    >>> r["reward_model"]
    {'style': 'gsm8k', 'ground_truth': '2'}
    """
    columns: PromptRow = {
        "data_source": data_source,
        "prompt": [dict(message) for message in messages],
        "ability": ability,
        "reward_model": {"style": verifier, "ground_truth": ground_truth},
        "extra_info": dict(extra_info or {}),
    }
    if images:
        columns["images"] = list(images)
    return columns


def prompt_row(prompt: Prompt) -> PromptRow:
    """The parquet row of a prompt. Its id is not stored: readers derive it from data source, split and row number."""
    return row(
        data_source=prompt.data_source,
        messages=prompt.messages,
        verifier=prompt.verifier or NO_VERIFIER,
        ground_truth=prompt.ground_truth,
        ability=prompt.ability,
        extra_info=prompt.extra_info,
        images=prompt.images,
    )


def write_rows(path: str | Path, rows: Iterable[PromptRow]) -> int:
    """Write `rows` to the parquet file `path`, atomically, and return their number.

    Raises `DataError` if there are none, if one does not fit the schema, or if `path` cannot be written.
    """
    table = rows_table(list(rows))
    write_tables({Path(path): table})
    return int(table.num_rows)


def write_prompts(path: str | Path, prompts: Iterable[Prompt]) -> int:
    """`write_rows` for prompts."""
    return write_rows(path, map(prompt_row, prompts))


def write_tables(tables: Mapping[Path, pa.Table]) -> None:
    """Write each pyarrow table to its parquet file, atomically: all of them or, with a `DataError`, none."""
    if not all(map(len, tables.values())):
        raise DataError("no rows to write", "check the source and the counts")
    write_parts({path: [table] for path, table in tables.items()})


def write_parts(parts: Mapping[Path, Iterable[pa.Table]]) -> None:
    """Write the pyarrow tables of each parquet file one after another: all files or, with a `DataError`, none. The
    tables of a file have one schema, and there is at least one."""
    paths = list(parts)
    new_folders = [folder for path in paths for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_all(paths) as temporary_files:
            for file, tables in zip(temporary_files, parts.values(), strict=True):
                _write_file(file, tables)
    except (DataError, UnfitStruct):  # of a row, which is read only now
        for folder in new_folders:
            with suppress(OSError):
                folder.rmdir()
        raise
    except OSError as error:
        raise DataError(
            f"cannot write {' and '.join(map(str, paths))}: {error.strerror or error}",
            "give a writable folder with free space",
        ) from error


def _write_file(file: Path, tables: Iterable[pa.Table]) -> None:
    import pyarrow.parquet

    rest = iter(tables)
    first = next(rest)
    row_group_size = IMAGE_ROWS if "images" in first.column_names else None
    with pyarrow.parquet.ParquetWriter(file, first.schema) as writer:
        for table in chain([first], rest):
            writer.write_table(table, row_group_size)


def unpack_extra_info(stored: Mapping[str, object] | None) -> dict[str, object]:
    """The dict that was given as `extra_info`, from the column's value. Raises ValueError or TypeError if its JSON text
    is not that of an object."""
    if stored is None:
        return {}
    if set(stored) == {JSON_FIELD}:
        text = stored[JSON_FIELD]
        if not isinstance(text, str | bytes):
            raise TypeError(f"{JSON_FIELD} is not text")
        return dict(parse_json(text))
    return dict(stored)


def rows_table(rows: Sequence[PromptRow], extra_info: pa.DataType | None = None, has_images: bool = False) -> pa.Table:
    """`rows`, as `row` makes them, as a pyarrow table. Raises `DataError` like `write_rows`.

    Of rows that are a part of a file, extra_info: the type of that column in all parts, or `UnfitStruct` if a value of
    theirs does not fit; has_images: whether any part has images.
    """
    import pyarrow as pa

    text = pa.string()
    message = pa.struct([("role", text), ("content", text)])
    reward_model = pa.struct([("style", text), ("ground_truth", text)])
    columns = {
        "data_source": _column("data_source", [row["data_source"] for row in rows], text),
        "prompt": _column("prompt", [row["prompt"] for row in rows], pa.list_(message)),
        "ability": _column("ability", [row["ability"] for row in rows], text),
        "reward_model": _column("reward_model", [row["reward_model"] for row in rows], reward_model),
        "extra_info": extra_info_column([row["extra_info"] for row in rows], extra_info),
    }
    if has_images or any(row.get("images") for row in rows):
        columns["images"] = image_column([row.get("images", ()) for row in rows])
    return pa.table(columns)


def image_column(rows: Sequence[Sequence[bytes]]) -> pa.ChunkedArray:
    """The encoded images of each row as a column of list<struct<bytes, path>>, without paths."""
    import pyarrow as pa

    kind = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    try:
        return pa.chunked_array([_images(images, kind) for images in rows], type=kind)  # a chunk has at most 2 GiB
    except (pa.ArrowException, TypeError) as error:
        raise DataError(f"column 'images' is not {kind}: {error!s:.200}", "fix the converter") from error


def _images(images: Sequence[bytes], kind: pa.ListType) -> pa.ListArray:
    """One row of `image_column`. A single image, as most rows have, is not copied."""
    import pyarrow as pa

    if len(images) != 1 or type(images[0]) is not bytes:
        return pa.array([[{"bytes": image, "path": None} for image in images]], type=kind)
    offsets = pa.array([0, len(images[0])], pa.int32()).buffers()[1]
    image = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(images[0])])
    struct = pa.StructArray.from_arrays([image, pa.nulls(1, pa.string())], fields=list(kind.value_type))
    return pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), struct, type=kind)


def _column(name: str, values: Sequence[object], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    def fitting(some: Sequence[object]) -> pa.Array | None:
        with suppress(pa.ArrowException, TypeError, ValueError):
            array = pa.array(some, type=kind)
            # Arrow drops unknown struct fields and fills missing ones with nulls, silently: only equality shows it.
            return array if array.to_pylist() == some else None
        return None

    if (column := fitting(values)) is not None:
        return column
    number, value = next((number, value) for number, value in enumerate(values) if fitting([value]) is None)
    raise DataError(f"row {number}: column '{name}' holds {value!r:.200}, which is not {kind}", "fix the converter")


def extra_info_type(parts: Iterable[Sequence[Mapping[str, object]]]) -> pa.DataType | None:
    """The type of the column `extra_info` for rows that are written in parts: a struct that fits all, or that of JSON
    text; None if there are no rows."""
    import pyarrow as pa

    kind = None
    for values in parts:
        if any(JSON_FIELD in value for value in values):
            return json_type()
        try:
            part_type = pa.array(values).type
            schemas = [pa.schema([("extra_info", struct)]) for struct in (kind or part_type, part_type)]
            kind = pa.unify_schemas(schemas, promote_options="default").field(0).type
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return json_type()
    return kind


def json_type() -> pa.StructType:
    """The type of the column `extra_info` if it is JSON text."""
    import pyarrow as pa

    return pa.struct([(JSON_FIELD, pa.string())])


def extra_info_column(values: Sequence[Mapping[str, object]], kind: pa.DataType | None = None) -> pa.Array:
    """`values` as a struct column that reads back exactly, with JSON text inside if a plain struct would lose data.
    kind: the column's type, if it is known. Raises `UnfitStruct`."""
    import pyarrow as pa
    import pyarrow.parquet

    texts = []
    for number, value in enumerate(values):
        try:
            texts.append(json.dumps(value, sort_keys=True, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DataError(f"row {number}: extra_info is not JSON: {error}", "fix the converter") from error
    if kind != json_type() and not any(JSON_FIELD in value for value in values):
        try:
            array = pa.array(values, type=kind)
            # Parquet refuses some types that Arrow has (a struct without fields), so the trial writes a file.
            pyarrow.parquet.write_table(pa.table({"extra_info": array}), io.BytesIO())
            if [json.dumps(value, sort_keys=True) for value in array.to_pylist()] == texts:
                return array
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            pass
    if kind not in (None, json_type()):
        raise UnfitStruct
    return pa.array([{JSON_FIELD: text} for text in texts])
