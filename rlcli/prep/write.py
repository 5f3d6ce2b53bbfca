"""Write the splits of a dataset as parquet files in the chosen format, with the record of how they were made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.data.prompts.provenance import stamped
from rlcli.data.prompts.schema import image_column, prompt_row, rows_table, write_tables
from rlcli.images.rows import content_parts
from rlcli.types import Prompt


def write_splits(
    out: Path, splits: Mapping[str, Sequence[Prompt]], record: Mapping[str, Any], output_format: str = "verl"
) -> dict[str, Path]:
    """Write `<split>.parquet` of each split to the folder `out`: all of them, or none and a `DataError`.

    record: the output of `provenance`. output_format: "verl" (see `schema`) or "trl" (see `_flat_table`).
    """
    tables = {}
    for split, prompts in splits.items():
        table = _flat_table(prompts) if output_format == "trl" else rows_table([prompt_row(one) for one in prompts])
        tables[out / f"{split}.parquet"] = stamped(table, {**record, "split": split})
    write_tables(tables)
    return dict(zip(splits, tables, strict=True))


def _flat_table(prompts: Sequence[Prompt]) -> Any:
    """Flat columns as TRL's trainers read them, which pass all but `prompt` to the reward functions by name.

    A pyarrow table of `prompt` (messages), `solution` (the answer; in mathematics between $ signs, where TRL's
    accuracy_reward finds it), `answer` (unchanged), `data_source`, `verifier`, and the scalar fields of `extra_info`.

    A field of `extra_info` with the name of another column becomes `extra_NAME`. If there are pictures, they are the
    column `images`, and a message's content is a list of parts.
    """
    import pyarrow as pa

    has_images = any(prompt.images for prompt in prompts)
    part = pa.struct([("type", pa.string()), ("text", pa.string())])
    message = pa.struct([("role", pa.string()), ("content", pa.list_(part) if has_images else pa.string())])
    columns: dict[str, Any] = {
        "prompt": pa.array([_messages(prompt, has_images) for prompt in prompts], type=pa.list_(message)),
        "solution": [_solution(prompt) for prompt in prompts],
        "answer": [prompt.ground_truth for prompt in prompts],
        "data_source": [prompt.data_source for prompt in prompts],
        "verifier": [prompt.verifier for prompt in prompts],
    }
    names = dict.fromkeys(name for prompt in prompts for name in prompt.extra_info)
    for name in names:
        values = [prompt.extra_info.get(name) for prompt in prompts]
        if all(value is None or isinstance(value, str | bool | int | float) for value in values):
            columns[f"extra_{name}" if name in columns else name] = _one_type(values)
    return _with_images(columns, prompts) if has_images else pa.table(columns)


def _messages(prompt: Prompt, as_parts: bool) -> list[dict[str, Any]]:
    if not as_parts:
        return [dict(one) for one in prompt.messages]
    if not prompt.images:  # a marker without a picture is text
        return [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in prompt.messages]
    return [{**one, "content": content_parts(one["content"])} for one in prompt.messages]


def _with_images(columns: dict[str, Any], prompts: Sequence[Prompt]) -> Any:
    """The table with a column of pictures that `datasets` decodes: its metadata names the type."""
    import datasets
    import pyarrow as pa

    table = pa.table({**columns, "images": image_column([prompt.images for prompt in prompts])})
    features = datasets.Features.from_arrow_schema(table.schema)
    features["images"] = datasets.List(datasets.Image())
    return table.replace_schema_metadata(features.arrow_schema.metadata)


def _solution(prompt: Prompt) -> str:
    answer = prompt.ground_truth
    return answer if prompt.ability != "math" or "$" in answer or "\\boxed" in answer else f"${answer}$"


def _one_type(values: list[Any]) -> Any:
    import pyarrow as pa

    kinds = {type(value) for value in values if value is not None}
    try:
        if len(kinds) <= 1:
            return pa.array(values)
    except (pa.ArrowException, OverflowError):  # an integer of more than 64 bits
        pass
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array(texts, type=pa.string())
