"""Rows of `prep` are in a file: memory holds a few of them, whatever their number, and all steps see the same rows."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rlcli.data.prompts.parquet_schema import JSON_FIELD
from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.prep.pipeline import Plan, prepare
from rlcli.prep.row_store import Row, RowStore, StoredPrompts, StoredRows
from rlcli.prep.split_writer import write_splits
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow


def prompt(number: int, **extra: Any) -> Prompt:
    messages = ({"role": "user", "content": f"{number} + 1 = " + "?" * 400},)
    return Prompt(f"toy:train:{number}", messages, "toy", "math", "gsm8k", str(number + 1), {"number": number, **extra})


def many(count: int, **extra: Any) -> Converter:
    """A dataset of so many rows, read one by one."""

    def read(options: ConvertOptions) -> Mapping[str, Iterator[RawRow]]:
        return {"train": (RawRow({"number": number}, f"row {number}") for number in range(count))}

    return Converter("toy", "", "generated", "gsm8k", read, lambda row, options: prompt(row["number"], **extra))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcli.prep.row_store.CHUNK_ROWS", 100)


def stored(count: int) -> StoredRows:
    store = RowStore()
    for number in range(count):
        store.add(Row(prompt(number), f"row {number}"))
    return StoredRows(store, np.arange(count))


def test_rows_come_back_in_any_order() -> None:
    rows = stored(250)
    assert [row.prompt for row in rows] == [prompt(number) for number in range(250)]
    assert [len(chunk) for chunk in rows.chunks()] == [100, 100, 50]
    selected = rows.take([249, 3, 4, 5, 0])
    assert [row.where for row in selected] == ["row 249", "row 3", "row 4", "row 5", "row 0"]
    assert selected[1] == Row(prompt(3), "row 3")
    assert [row.where for row in selected[1:3]] == ["row 3", "row 4"]
    assert StoredPrompts(selected) == [prompt(number) for number in (249, 3, 4, 5, 0)]
    assert StoredPrompts(selected) != [prompt(0)]


def test_a_chunk_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcli.prep.row_store.CHUNK_BYTES", 2000)
    chunks = list(stored(20).chunks())
    assert max(map(len, chunks)) <= 4
    assert [row.where for chunk in chunks for row in chunk] == [f"row {number}" for number in range(20)]
    monkeypatch.setattr("rlcli.prep.row_store.CHUNK_BYTES", 1)
    assert [len(chunk) for chunk in stored(3).chunks()] == [1, 1, 1]


def peak_of(count: int, folder: Path) -> int:
    """Bytes of Python and NumPy at most, while so many rows are prepared and written."""
    tracemalloc.start()
    try:
        plan = Plan(min_chars=1, shuffle=0, test_size=0.1, check=False)
        write_splits(folder, prepare(many(count), ConvertOptions(), plan).splits, {})
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peak_of(200, tmp_path / "first")  # what is imported and cached once
    few, larger = peak_of(500, tmp_path / "few"), peak_of(4500, tmp_path / "more")
    # A row held as a prompt takes more than 1,000 bytes; a shuffle holds the number of each.
    assert (larger - few) / 4000 < 150
    assert pq.ParquetFile(tmp_path / "more" / "train.parquet").metadata.num_rows == 4050


def test_rows_written_in_parts_read_back_like_rows_in_memory(tmp_path: Path) -> None:
    splits = prepare(many(250), ConvertOptions()).splits
    write_splits(tmp_path / "parts", splits, {})
    write_splits(tmp_path / "whole", {"train": list(splits["train"])}, {})
    parts, at_once = (pq.read_table(tmp_path / name / "train.parquet") for name in ("parts", "whole"))
    assert parts.equals(at_once)
    assert list(read_prompts(tmp_path / "parts", "train")) == list(splits["train"])
    write_splits(tmp_path / "flat", splits, {}, "trl")
    write_splits(tmp_path / "flat whole", {"train": list(splits["train"])}, {}, "trl")
    parts, at_once = (pq.read_table(tmp_path / name / "train.parquet") for name in ("flat", "flat whole"))
    assert parts.equals(at_once)


def test_a_late_row_of_another_shape_makes_all_rows_json(tmp_path: Path) -> None:
    def late(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
        number = row["number"]
        return prompt(number, **({"only": [1, "two"]} if number == 240 else {}))

    splits = prepare(replace(many(250), prompt=late), ConvertOptions()).splits
    write_splits(tmp_path, splits, {})
    (names,) = {tuple(row) for row in pq.read_table(tmp_path / "train.parquet")["extra_info"].to_pylist()}
    assert names == (JSON_FIELD,)
    assert read_prompts(tmp_path, "train")[240].extra_info["only"] == [1, "two"]


def test_a_row_that_cannot_be_written_leaves_no_folder(tmp_path: Path) -> None:
    splits = prepare(many(250, odd={1, 2}), ConvertOptions()).splits
    with pytest.raises(Exception, match="extra_info is not JSON"):
        write_splits(tmp_path / "a" / "b", splits, {})
    assert list(tmp_path.iterdir()) == []


def test_equal_prompts_are_found_across_chunks() -> None:
    twice = replace(many(400), prompt=lambda row, options: prompt(row["number"] % 250))
    prepared = prepare(twice, ConvertOptions(), Plan(dedup=True, check=False))
    assert len(prepared.splits["train"]) == 250
    assert prepared.steps[-1].removed == {"repeated": 150}
    assert json.dumps(prepared.steps[-1].examples[0]) == '"row 250 repeats row 0"'
