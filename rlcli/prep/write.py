"""Write the splits of a dataset as parquet files in the chosen format, with the record of how they were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.data.prompts.provenance import stamped
from rlcli.data.prompts.schema import prompt_row, rows_table, write_tables
from rlcli.prep.trl import flat_table
from rlcli.types import Prompt


def write_splits(
    out: Path, splits: Mapping[str, Sequence[Prompt]], record: Mapping[str, Any], output_format: str = "verl"
) -> dict[str, Path]:
    """Write `<split>.parquet` of each split to the folder `out`: all of them, or none and a `DataError`.

    record: the output of `provenance`. output_format: "verl" (see `schema`) or "trl" (see `trl`).
    """
    tables = {}
    for split, prompts in splits.items():
        table = flat_table(prompts) if output_format == "trl" else rows_table([prompt_row(one) for one in prompts])
        tables[out / f"{split}.parquet"] = stamped(table, {**record, "split": split})
    write_tables(tables)
    return dict(zip(splits, tables, strict=True))
