"""Data that are not prepared are refused with the command that prepares them."""

from __future__ import annotations

import gzip
import json
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcli.cli.main import main
from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.errors import DataError

ROWS = [{"question": f"{n}+1=", "target": str(n + 1), "level": n} for n in range(3)]


def refused(path: Path | str) -> str:
    with pytest.raises(DataError) as error:
        read_prompts(path, "train")
    return str(error.value)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["sums.jsonl", "sums.jsonl.gz", "sums.csv", "sums.parquet"])
def test_the_command_for_a_file_makes_rows_of_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "\n".join(map(json.dumps, ROWS)).encode()
    if name == "sums.parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), name)
    else:
        csv = b"question,target,level\n" + b"\n".join(f"{n}+1=,{n + 1},{n}".encode() for n in range(3))
        Path(name).write_bytes(csv if name.endswith("csv") else gzip.compress(lines) if "gz" in name else lines)
    message = refused(name)
    command = f"rlcli prep jsonl --source {name} --columns prompt=question,answer=target --out data/sums"
    kind = "is not a parquet file that rlcli prep has made"
    kind = "has no column 'data_source' (it has question, target, level)" if name == "sums.parquet" else kind
    assert message == f"data: {name} {kind}; make rows of it: {command}, then give data/sums"
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    assert [row.ground_truth for row in read_prompts("data/sums", "train", "gsm8k")] == ["1", "2", "3"]


def test_a_folder_of_raw_files_is_named() -> None:
    Path("raw").mkdir()
    Path("raw/train.jsonl").write_text("")
    assert "rlcli prep jsonl --source raw --out data/raw, then give data/raw" in refused("raw")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("openai/gsm8k", "for the dataset of the hub: rlcli prep gsm8k, then give data/gsm8k"),
        ("me/my-rows", "for the dataset of the hub: rlcli prep hf --source me/my-rows --out data/my-rows, then give"),
        ("data/gsm8k", "make it with: rlcli prep gsm8k --out data/gsm8k"),
        ("data/mine", "make it with: rlcli prep NAME --out data/mine"),
        ("rows.jsonl", "no such file or folder: rows.jsonl; check its name"),
    ],
)
def test_what_is_not_there_may_be_a_dataset_of_the_hub(path: str, says: str) -> None:
    assert says in refused(path)


def test_rows_that_name_no_verifier_ask_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert main(["prep", "jsonl", "--source", "rows.jsonl", "--out", "out"]) == 0
    assert "the rows name no verifier: name it when training" in capsys.readouterr().out
    assert "'reward_model.style' is 'rule', which names no verifier, and verl's table has none" in refused("out")
    assert read_prompts("out", "train", "gsm8k")[0].verifier == "gsm8k"
