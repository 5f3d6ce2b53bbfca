from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlcli.data.prompts.parquet_schema import row, write_prompts, write_rows
from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.errors import DataError
from rlcli.types import Prompt


def toy_row(**changes: object) -> dict[str, object]:
    defaults = {"data_source": "toy", "messages": [{"role": "user", "content": "1+1="}], "verifier": "gsm8k"}
    return row(**{**defaults, "ground_truth": "2", **changes})  # type: ignore[arg-type]


def test_a_file_has_the_columns_and_types_that_verl_reads(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    assert write_rows(path, [toy_row(extra_info={"split": "train", "index": 0})]) == 1
    schema = pq.read_schema(path)
    assert schema.names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert schema.field("prompt").type.value_type == pa.struct([("role", pa.string()), ("content", pa.string())])
    assert schema.field("reward_model").type == pa.struct([("style", pa.string()), ("ground_truth", pa.string())])
    assert schema.field("extra_info").type == pa.struct([("split", pa.string()), ("index", pa.int64())])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.long
@settings(max_examples=50)
@given(infos=st.lists(st.dictionaries(st.sampled_from(["a", "b", "rlcli_json"]), json_values, max_size=3), min_size=1))
@example(infos=[{"a": 1}, {"a": 1.0}])
@example(infos=[{"a": {}}])
@example(infos=[{"a": None}, {}])
@example(infos=[{"a": 2**70}])
@example(infos=[{"a": "\ud800"}])
def test_any_extra_info_of_json_values_survives(tmp_path_factory: pytest.TempPathFactory, infos: list[dict]) -> None:
    path = tmp_path_factory.mktemp("any") / "train.parquet"
    write_rows(path, [toy_row(extra_info=info) for info in infos])
    back = [prompt.extra_info for prompt in read_prompts(path, "train")]
    # As text, because 1 == 1.0 == True in Python.
    assert [json.dumps(info, sort_keys=True) for info in back] == [json.dumps(info, sort_keys=True) for info in infos]


def test_prompts_come_back_as_they_were_written(tmp_path: Path) -> None:
    prompts = [
        Prompt(
            id=f"toy:test:{i}",
            messages=({"role": "system", "content": "Add."}, {"role": "user", "content": f"{i}+1=\n"}),
            data_source="toy",
            ability="math",
            verifier="gsm8k",
            ground_truth=str(i + 1),
            extra_info={"index": i, "nested": {"of": [1, 2]}},
        )
        for i in range(3)
    ]
    write_prompts(tmp_path / "test.parquet", prompts)
    assert list(read_prompts(tmp_path, "test")) == prompts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ground_truth": 2}, "row 1: column 'reward_model'"),
        ({"messages": [{"role": "user", "content": "1", "name": "Ann"}]}, "row 1: column 'prompt'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "row 1: column 'prompt'"),
        ({"extra_info": {"when": object()}}, "row 1: extra_info is not JSON"),
    ],
)
def test_a_row_that_does_not_fit_is_named_not_bent(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_rows(tmp_path / "train.parquet", [toy_row(), toy_row(**changes)])


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.parquet"
    write_rows(path, [toy_row()])
    original = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DataError, match="No space left"):
        write_rows(path, [toy_row(), toy_row()])
    assert path.read_bytes() == original
    assert [file.name for file in tmp_path.iterdir()] == ["train.parquet"]


def test_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        write_rows(tmp_path / "train.parquet", [])
