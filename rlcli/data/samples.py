"""Samples as people read them: one parquet file a worker and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlcli.files import replacing


def write_samples(path: Path, step: int, rows: list[dict[str, Any]]) -> None:
    """Write `rows` (dicts of plain values, all with the same keys) atomically, with a column `step`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([{"step": step, **row} for row in rows])
    with replacing(path) as beside:
        pq.write_table(table, beside)
