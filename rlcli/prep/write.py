"""Write the splits of a dataset as parquet files in the chosen format, with the record of how they were made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.data.prompts.provenance import stamped
from rlcli.data.prompts.schema import prompt_row, rows_table, write_tables
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

    A field of `extra_info` with the name of another column becomes `extra_NAME`.
    """
    import pyarrow as pa

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    columns: dict[str, Any] = {
        "prompt": pa.array([[dict(one) for one in prompt.messages] for prompt in prompts], type=pa.list_(message)),
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
    return pa.table(columns)


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
