from __future__ import annotations

import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcli.data.prompts.parquet_schema import JSON_FIELD, row, write_rows
from rlcli.data.prompts.prompt_table import JoinedPrompts, PromptTable, _codes, read_prompts, verifiers_of
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.errors import DataError
from rlcli.model.io.tiny_model import tiny_tokenizer
from rlcli.types import Prompt


def rows(count: int, **extra: Any) -> list[dict[str, Any]]:
    return [
        row(
            data_source=f"toy{i % 2}",
            messages=[{"role": "system", "content": "Add."}, {"role": "user", "content": f"{i}+1="}],
            verifier=("gsm8k", "math", "format")[i % 3],
            ground_truth=str(i + 1),
            extra_info={"index": i, **extra},
        )
        for i in range(count)
    ]


def written(path: Path, count: int, **extra: Any) -> PromptTable:
    write_rows(path, rows(count, **extra))
    return read_prompts(path, "train")


def expected(count: int) -> list[Prompt]:
    return [
        Prompt(
            f"{row['data_source']}:train:{i}",
            tuple(row["prompt"]),
            row["data_source"],
            "math",
            row["reward_model"]["style"],
            row["reward_model"]["ground_truth"],
            row["extra_info"],
        )
        for i, row in enumerate(rows(count))
    ]


def test_rows_are_the_same_however_they_are_asked_for(tmp_path: Path) -> None:
    table, rows = written(tmp_path / "a.parquet", 700), expected(700)
    assert list(table) == rows
    assert [table[i] for i in (0, 1, 699, -1)] == [rows[i] for i in (0, 1, 699, -1)]
    assert list(table[3:300]) == rows[3:300]
    assert list(table[3:300][200:][:5]) == rows[203:208]
    assert list(table.take([5, 6, 400, 699])) == [rows[i] for i in (5, 6, 400, 699)]
    with pytest.raises(IndexError):
        table[700]


def test_a_pickled_part_holds_its_own_rows_alone(tmp_path: Path) -> None:
    table = written(tmp_path / "a.parquet", 2000, text="x" * 1000)
    part = pickle.dumps(table[500:520])
    assert list(pickle.loads(part)) == list(table[500:520])
    assert len(part) < 60_000


def test_joined_prompts_are_their_parts_end_to_end(tmp_path: Path) -> None:
    table, extra = written(tmp_path / "a.parquet", 10), expected(5)
    joined = JoinedPrompts([table, extra, table[:0], table[8:]])
    rows = [*table, *extra, *table[8:]]
    assert list(joined) == rows
    assert [joined[i] for i in range(-len(rows), len(rows))] == [*rows, *rows]
    some = joined.take([0, 9, 10, 14, 16])
    assert list(some) == [rows[i] for i in (0, 9, 10, 14, 16)]
    assert some.starts.tolist() == [0, 2, 4, 4, 5]
    assert list(joined[2:12]) == rows[2:12]


def test_each_verifier_is_told_with_the_first_row_that_names_it(tmp_path: Path) -> None:
    table = written(tmp_path / "a.parquet", 9)
    assert table[1:].verifiers() == {"math": "toy1:train:1", "format": "toy0:train:2", "gsm8k": "toy1:train:3"}
    assert verifiers_of(list(table[1:])) == table[1:].verifiers()
    joined = JoinedPrompts([table[:1], table[2:]])
    assert verifiers_of(joined) == {"gsm8k": "toy0:train:0", "format": "toy0:train:2", "math": "toy0:train:4"}
    prompts = read_prompts(tmp_path / "a.parquet", "train", "gsm8k + 0.1 * format")
    assert prompts.verifiers() == {"gsm8k + 0.1 * format": "toy0:train:0"}


@pytest.mark.long
def test_codes_are_equal_for_equal_texts_only() -> None:
    texts = ["a", "b", None, "a", "c", None, "b", "a"]
    column = pa.chunked_array([pa.array(["b", *texts[:3]])[1:], pa.array(texts[3:6]), pa.array(texts[6:])])
    codes = _codes(column)
    assert codes.dtype == np.int64
    assert [[code == other for other in codes] for code in codes] == [
        [text == other for other in texts] for text in texts
    ]


def test_a_row_holds_less_than_200_bytes_beyond_its_text(tmp_path: Path) -> None:
    count = 30_000
    write_rows(tmp_path / "a.parquet", rows(count))
    pool = pa.default_memory_pool()
    bytes_before = pool.bytes_allocated()
    tracemalloc.start()
    try:
        table = read_prompts(tmp_path / "a.parquet", "train")
        python, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    text = sum(len(str(message)) for prompt in table for message in prompt.messages)
    assert (pool.bytes_allocated() - bytes_before + python - text) / count < 200


BAD_ROWS = [
    ({"prompt": [{"role": "user", "content": None}]}, "'prompt' must be a list of messages"),
    ({"prompt": []}, "'prompt' must be a list of messages"),
    ({"reward_model": {"style": "gsm8k", "ground_truth": None}}, "'reward_model' must hold 'ground_truth'"),
    ({"reward_model": {"style": "rule", "ground_truth": "2"}}, "'reward_model.style' is 'rule'"),
    ({"reward_model": {"style": "no such(", "ground_truth": "2"}}, "'reward_model.style' is 'no such('"),
    ({"data_source": None}, "'data_source' and 'ability' must be text"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_ROWS)
def test_the_first_bad_row_of_many_is_named(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    many = rows(300)
    many[257] |= bad
    many[280] |= bad
    pq.write_table(pa.Table.from_pylist(many), tmp_path / "a.parquet", row_group_size=100)
    with pytest.raises(DataError, match=r"row 257 \(the first is 0\)") as raised:
        read_prompts(tmp_path / "a.parquet", "train")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", "3", "[" * 100_000, '{"a":' * 100_000, None],
    ids=["half", "list", "number", "deep list", "deep object", "null"],
)
def test_an_extra_info_that_is_no_object_names_the_row(tmp_path: Path, text: str | None) -> None:
    many = [row | {"extra_info": {JSON_FIELD: json.dumps(row["extra_info"])}} for row in rows(5)]
    many[3]["extra_info"] = {JSON_FIELD: text}
    pq.write_table(pa.Table.from_pylist(many), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 3 \(the first is 0\): 'extra_info\.rlcli_json' is not the JSON of"):
        read_prompts(tmp_path / "a.parquet", "train")


def test_columns_of_other_types_that_hold_prompts_are_read(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(rows(5))
    table = table.set_column(0, "data_source", table.column("data_source").dictionary_encode())
    table = table.set_column(2, "ability", pa.nulls(5))
    pq.write_table(table, tmp_path / "a.parquet")
    read = read_prompts(tmp_path / "a.parquet", "train")
    assert [prompt.data_source for prompt in read] == ["toy0", "toy1", "toy0", "toy1", "toy0"]
    assert {prompt.ability for prompt in read} == {""}


def test_tokenizing_a_table_equals_tokenizing_its_rows(tmp_path: Path) -> None:
    table, tokenizer = written(tmp_path / "a.parquet", 1300), tiny_tokenizer()
    limit = len(tokenizer.apply_chat_template(list(table[0].messages), add_generation_prompt=True)["input_ids"])
    as_table = TokenizedPrompts.tokenize(table, tokenizer, limit)
    as_rows = TokenizedPrompts.tokenize(list(table), tokenizer, limit)
    assert 0 < as_table.too_long == as_rows.too_long
    assert list(as_table.prompts) == list(as_rows.prompts)
    assert np.array_equal(as_table.flat, as_rows.flat)
    assert as_table.fingerprint() == as_rows.fingerprint()
    lengths = [len(as_table.tokens(i)) for i in range(len(as_table))]
    assert as_table.longest() == lengths.index(max(lengths))


@pytest.mark.parametrize("style", ["rule", "", None])
def test_rows_that_are_not_verified_need_no_verifier(tmp_path: Path, style: str | None) -> None:
    many = rows(300)
    for number in (0, 257):
        many[number]["reward_model"] = {"style": style, "ground_truth": "2"}
    pq.write_table(pa.Table.from_pylist(many), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="which names no verifier"):
        read_prompts(tmp_path / "a.parquet", "train")
    table = read_prompts(tmp_path / "a.parquet", "train", verified=False)
    assert [table[number].verifier for number in (0, 1, 257)] == ["", rows(2)[1]["reward_model"]["style"], ""]
    assert table.verifiers() == {}
    assert read_prompts(tmp_path / "a.parquet", "train", "math", verified=False).verifiers() == {"math": table[0].id}
