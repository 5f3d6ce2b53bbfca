from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.data.prompts.provenance import recorded
from rlcli.errors import ConfigError, DataError
from rlcli.prep.difficulty import Keep, histogram, write_kept


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [
        row(data_source="toy", messages=[{"role": "user", "content": f"{i}?"}], verifier="gsm8k", ground_truth=str(i))
        for i in range(4)
    ]
    write_rows(tmp_path / "train.parquet", [{**fields, "extra_info": {"index": i}} for i, fields in enumerate(rows)])
    return tmp_path / "train.parquet"


@pytest.mark.parametrize(
    ("text", "samples", "message"),
    [
        ("0.5", 8, "is not LOW:HIGH"),
        ("a:b", 8, "is not LOW:HIGH"),
        ("0.1:0.9:1", 8, "is not LOW:HIGH"),
        ("0.9:0.1", 8, "is not a pass-rate range"),
        ("-0.1:0.5", 8, "is not a pass-rate range"),
        ("0.1:2", 8, "is not a pass-rate range"),
        ("nan:1", 8, "is not a pass-rate range"),
        ("0.1:0.12", 8, "keeps nothing: .* multiples of 1/8"),
        ("0.1:0.9", 1, "keeps nothing"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused(text: str, samples: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Keep.parse(text, samples)


def test_both_ends_of_a_range_are_in_it() -> None:
    keep = Keep.parse("0.1:0.9", 10)
    assert [tenths for tenths in range(11) if tenths / 10 in keep] == list(range(1, 10))


def test_kept_rows_stay_as_they_were_but_for_their_pass_rate(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "train.parquet"
    rates = {0: 0.0, 1: 0.5, 3: 0.25}  # row 2 was not scored
    assert write_kept(file, target, rates, Keep(0.1, 0.9), {"model": "tiny"}) == 2
    prompts = read_prompts(target, "train")
    assert [prompt.ground_truth for prompt in prompts] == ["1", "3"]
    assert [prompt.extra_info for prompt in prompts] == [
        {"index": 1, "pass_rate": 0.5},
        {"index": 3, "pass_rate": 0.25},
    ]
    second_target = tmp_path / "again" / "train.parquet"
    assert write_kept(target, second_target, {0: 1.0, 1: 0.5}, Keep(0.0, 0.5), {"model": "other"}) == 1
    record = recorded(pq.read_schema(second_target).metadata)
    assert record == {"filters": [{"model": "tiny"}, {"model": "other"}]}
    assert read_prompts(second_target, "train")[0].extra_info["pass_rate"] == 0.5


def test_a_file_of_others_without_extra_info_gets_the_column(file: Path, tmp_path: Path) -> None:
    pq.write_table(pq.read_table(file).drop_columns("extra_info").append_column("own", pa.array(range(4))), file)
    target = tmp_path / "out" / "train.parquet"
    write_kept(file, target, {2: 0.5}, Keep(0.1, 0.9), {})
    (row,) = pq.read_table(target).to_pylist()
    assert (row["own"], row["extra_info"]) == (2, {"pass_rate": 0.5})


def test_where_nothing_is_kept_nothing_is_written(file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no prompt .* from 0\.1 to 0\.9 \(1 never solved, 0 sometimes, 1 always\)"):
        write_kept(file, tmp_path / "out" / "train.parquet", {0: 0.0, 1: 1.0}, Keep(0.1, 0.9), {})
    assert not (tmp_path / "out").exists()


def test_a_histogram_keeps_what_teaches_nothing_apart() -> None:
    rates = {0: 0.0, 1: 1 / 64, 2: 0.5, 3: 63 / 64, 4: 1.0, 5: 1.0}
    assert histogram(rates, 64) == {
        **{f"{tenth}/10": 0 for tenth in range(11)},
        **{"0/10": 1, "1/10": 1, "5/10": 1, "9/10": 1, "10/10": 2},
    }
    assert histogram({0: 1.0}, 1) == {"0/1": 0, "1/1": 1}
