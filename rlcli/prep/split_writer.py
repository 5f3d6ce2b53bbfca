"""Writes the splits of a dataset as parquet files in one of two formats, with their provenance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.data.prompts.parquet_schema import (
    UnfitStruct,
    extra_info_type,
    image_column,
    json_type,
    prompt_row,
    rows_table,
    write_parts,
)
from rlcli.data.prompts.provenance import stamped
from rlcli.errors import DataError
from rlcli.images.row_images import content_parts
from rlcli.prep.row_store import are_chunked, chunks_of, have_images
from rlcli.types import Prompt

if TYPE_CHECKING:
    import pyarrow as pa


def write_splits(
    out: Path, splits: Mapping[str, Sequence[Prompt]], record: Mapping[str, Any], output_format: str = "verl"
) -> dict[str, Path]:
    """Write `<split>.parquet` of each split to the folder `out`: all of them, or none and a `DataError`.

    record: the output of `provenance`. output_format: "verl" (see `schema`) or "trl" (see `_flat_tables`).
    """
    files = {out / f"{split}.parquet": prompts for split, prompts in splits.items()}
    records = {out / f"{split}.parquet": {**record, "split": split} for split in splits}
    write_files(files, records, output_format)
    return dict(zip(splits, files, strict=True))


def write_files(
    files: Mapping[Path, Sequence[Prompt]],
    records: Mapping[Path, Mapping[str, Any]] | None = None,
    output_format: str = "verl",
) -> None:
    """Write prompts to parquet files: all, or none and a `DataError`. records: the provenance of each file, if any."""
    if not all(map(len, files.values())):
        raise DataError("no rows to write", "check the source and the counts")

    def parts(extra_info: pa.DataType | None) -> dict[Path, Iterator[pa.Table]]:
        tables_by_path = {}
        for path, prompts in files.items():
            tables = _flat_tables(prompts) if output_format == "trl" else _tables(prompts, extra_info)
            tables_by_path[path] = _stamped(tables, records[path]) if records else tables
        return tables_by_path

    try:
        write_parts(parts(None))
    except UnfitStruct:  # known only once its rows are written
        write_parts(parts(json_type()))


def _stamped(tables: Iterable[pa.Table], record: Mapping[str, Any]) -> Iterator[pa.Table]:
    return (stamped(table, record) for table in tables)


def _tables(prompts: Sequence[Prompt], extra_info: pa.DataType | None) -> Iterator[pa.Table]:
    """The tables of a file as verl reads it."""
    kind, images = extra_info, have_images(prompts)
    if kind is None and are_chunked(prompts):
        kind = extra_info_type([dict(prompt.extra_info) for prompt in chunk] for chunk in chunks_of(prompts))
    for chunk in chunks_of(prompts):
        yield rows_table([prompt_row(prompt) for prompt in chunk], kind, images)


def _flat_tables(prompts: Sequence[Prompt]) -> Iterator[pa.Table]:
    """Flat columns as TRL's trainers read them, which pass all columns except `prompt` to the reward functions by name.

    Tables of `prompt` (messages), `solution` (the answer; in mathematics between $ signs, where TRL's accuracy_reward
    finds it), `answer` (unchanged), `data_source`, `verifier`, and the scalar fields of `extra_info`.

    A field of `extra_info` with the name of another column becomes `extra_NAME`. Images are in the column `images`, and
    a message's content is then a list of parts.
    """
    import pyarrow as pa

    has_images = have_images(prompts)
    part = pa.struct([("type", pa.string()), ("text", pa.string())])
    message = pa.struct([("role", pa.string()), ("content", pa.list_(part) if has_images else pa.string())])
    types = _flat_types(prompts)
    for chunk in chunks_of(prompts):
        columns: dict[str, Any] = {
            "prompt": pa.array([_messages(prompt, has_images) for prompt in chunk], type=pa.list_(message)),
            "solution": [_solution(prompt) for prompt in chunk],
            "answer": [prompt.ground_truth for prompt in chunk],
            "data_source": [prompt.data_source for prompt in chunk],
            "verifier": [prompt.verifier for prompt in chunk],
        }
        for name, kind in types.items():
            values = [prompt.extra_info.get(name) for prompt in chunk]
            columns[f"extra_{name}" if name in columns else name] = _typed(values, kind)
        yield _with_images(columns, chunk) if has_images else pa.table(columns)


def _flat_types(prompts: Sequence[Prompt]) -> dict[str, pa.DataType]:
    """Each field of `extra_info` that is a scalar in all rows → its Arrow type: text, if no other fits all values."""
    import pyarrow as pa

    kinds: dict[str, set[type]] = {}
    for prompt in prompts:
        for name, value in prompt.extra_info.items():
            value_types = kinds.setdefault(name, set())
            if value is not None:
                value_types.add(str if type(value) is int and not -(1 << 63) <= value < 1 << 63 else type(value))
    arrow = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    types: dict[str, pa.DataType] = {}
    for name, value_types in kinds.items():
        if all(kind in arrow for kind in value_types):
            types[name] = (
                arrow[next(iter(value_types))] if len(value_types) == 1 else pa.string() if value_types else pa.null()
            )
    return types


def _typed(values: list[Any], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    if kind == pa.string():
        values = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array(values, type=kind)


def _messages(prompt: Prompt, as_parts: bool) -> list[dict[str, Any]]:
    if not as_parts:
        return [dict(message) for message in prompt.messages]
    if not prompt.images:  # a marker without an image is text
        return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in prompt.messages]
    return [{**message, "content": content_parts(message["content"])} for message in prompt.messages]


def _with_images(columns: dict[str, Any], prompts: Sequence[Prompt]) -> pa.Table:
    """The table with a column of images that `datasets` decodes: its metadata names the type."""
    import datasets
    import pyarrow as pa

    table = pa.table({**columns, "images": image_column([prompt.images for prompt in prompts])})
    features = datasets.Features.from_arrow_schema(table.schema)
    features["images"] = datasets.List(datasets.Image())
    return table.replace_schema_metadata(features.arrow_schema.metadata)


def _solution(prompt: Prompt) -> str:
    answer = prompt.ground_truth
    return answer if prompt.ability != "math" or "$" in answer or "\\boxed" in answer else f"${answer}$"
