from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rlcli_data_prep.sources import from_hub, read_all, read_file, read_splits

from rlcli.cli.main import main
from rlcli.errors import DataError
from rlcli.types import ConvertOptions, RawRow

ROWS = [{"question": "2+2?", "answer": "4"}, {"question": "a\u2028b\n?", "answer": "1,5"}]
MATH_ROW = {"problem": "Half of 1?", "type": "Algebra", "solution": r"$\boxed{\frac{1}{2}}$."}


def write(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    file.write_bytes(gzip.compress(lines) if file.suffix == ".gz" else lines)
    return file


def values(rows: Iterable[RawRow]) -> list[Mapping[str, Any]]:
    return [row.values for row in rows]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "json.gz", "csv", "csv.gz", "parquet"])
def test_every_kind_of_file_gives_the_same_rows_with_where_they_are(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"train-00000-of-00001.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    else:
        quoted = "question,answer\r\n" + "".join(f'"{row["question"]}","{row["answer"]}"\r\n' for row in ROWS)
        lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
        content = {"jsonl": "\ufeff" + lines, "json": json.dumps(ROWS), "csv": "\ufeff" + quoted}[kind.split(".")[0]]
        data = content.encode()
        file.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    splits = {split: list(rows) for split, rows in read_splits(ConvertOptions(source=str(file)), "").items()}
    assert {split: [row.values for row in rows] for split, rows in splits.items()} == {"train": ROWS}
    last = splits["train"][1]
    location = {"jsonl": "line 2", "csv": "line 4"}.get(kind.split(".")[0], "row 1 (the first is 0)")
    assert (last.where, last.origin, last.problem) == (f"{file.name}, {location}", str(file), "")


def test_a_line_that_is_no_row_comes_as_its_problem_and_the_others_follow(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    good = b'{"question": "ok"}'
    file.write_bytes(b"\n".join([good, b"{", b"7", b'{"a": "\xff"}', b"", b"[" * 100_000, good, b"[5]"]))
    rows = list(read_file(file))
    assert [row.where for row in rows] == [f"train.jsonl, line {line}" for line in (1, 2, 3, 4, 6, 7, 8)]
    problems = [row.problem for row in rows]
    assert [bool(problem) for problem in problems] == [False, True, True, True, True, False, False]
    starts = ("not JSON: ", "not an object: ", "it is not UTF-8 (byte 0xff at 7)")
    assert all(problem.startswith(start) for problem, start in zip(problems[1:4], starts, strict=True)), problems
    assert (rows[0].values, rows[1].values, rows[6].values) == ({"question": "ok"}, {}, {"0": 5})
    (tmp_path / "train.csv").write_text("a,b\n1,2\n1,2,3\n1\n")
    assert [(row.values, row.problem) for row in read_file(tmp_path / "train.csv")] == [
        ({"a": "1", "b": "2"}, ""),
        ({}, "more fields than the header's 2"),
        ({"a": "1", "b": None}, ""),
    ]


def test_one_json_object_is_one_row_and_json_may_be_lines(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(json.dumps(MATH_ROW, indent=4))
    (tmp_path / "2.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert values(read_file(tmp_path / "1.json")) == [MATH_ROW]
    assert values(read_file(tmp_path / "2.json")) == [{"a": 1}, {"a": 2}]


def test_a_file_that_is_not_whole_is_named(tmp_path: Path) -> None:
    compressed = gzip.compress(b"".join(b'{"a": %d}\n' % number for number in range(999)))
    for damaged in (compressed[:20], compressed[:200] + b"x" * 40 + compressed[240:], b"no gzip at all"):
        (tmp_path / "train.jsonl.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"train\.jsonl\.gz cannot be read: .*; check that the file is complete"):
            list(read_file(tmp_path / "train.jsonl.gz"))
    for name in ("a.parquet", "a.json", "a.csv"):
        (tmp_path / name).write_bytes(b"[1, \xff" * 9)
        with pytest.raises(DataError, match=rf"{name} cannot be read"):
            list(read_file(tmp_path / name))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl has no rows"):
        list(read_file(tmp_path / "empty.jsonl"))


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train.jsonl", "test.jsonl"], {"train": ["train.jsonl"], "test": ["test.jsonl"]}),
        (["math_train_rllm_7.json", "math_test_5.jsonl.gz", "math500.jsonl"], {"train": [0], "test": [1]}),
        (["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"], {"train": [0, 1]}),
        (["train/1.json", "train/2.json", "test/1.json"], {"train": [0, 1], "test": [2]}),
        (["train.jsonl", "validation.jsonl"], {"train": [0], "test": [1]}),
        (["train.jsonl", "eval.csv", "test.jsonl"], {"train": [0], "test": [2]}),
        (["trainees.jsonl"], {"train": [0]}),
        (["rows.jsonl", ".cache/test.jsonl"], {"train": [0]}),
    ],
)
def test_the_names_of_files_say_their_split(tmp_path: Path, names: list[str], splits: dict[str, list[Any]]) -> None:
    # The folder's own name must not count.
    source = tmp_path / "test" / "source"
    for name in names:
        if name.endswith(".csv"):
            (source / name).write_text(f"name\n{name}\n")
        else:
            write(source / name, [{"name": name}])
    actual = {
        split: [row["name"] for row in values(rows)]
        for split, rows in read_splits(ConvertOptions(source=str(source)), "").items()
    }
    wanted = {
        split: [name if isinstance(name, str) else names[name] for name in them] for split, them in splits.items()
    }
    assert actual == wanted


def test_a_part_of_a_dataset_is_the_folder_of_its_name(tmp_path: Path) -> None:
    for part in ("main", "socratic"):
        write(tmp_path / part / "train.jsonl", [{"part": part}])
    source = ConvertOptions(source=str(tmp_path))
    assert values(read_splits(source, "", "main")["train"]) == [{"part": "main"}]
    convert_options = ConvertOptions(source=str(tmp_path), subset="socratic")
    assert values(read_splits(convert_options, "", "main")["train"]) == [{"part": "socratic"}]
    assert [row["part"] for row in values(read_splits(source, "")["train"])] == ["main", "socratic"]


def test_of_all_rows_a_folder_s_file_of_the_dataset_s_name_is_read(tmp_path: Path) -> None:
    write(tmp_path / "math-500.jsonl.gz", [{"a": 1}])
    write(tmp_path / "math_test_5000.jsonl.gz", [{"a": 2}])
    source = ConvertOptions(source=str(tmp_path))
    assert values(read_all(source, "", name="math500")) == [{"a": 1}]
    assert values(read_all(source, "", name="other")) == [{"a": 1}, {"a": 2}]


def test_a_source_that_cannot_be_used_says_what_it_is(tmp_path: Path) -> None:
    def refused(source: Path | str) -> str:
        with pytest.raises(DataError) as raised:
            read_splits(ConvertOptions(source=str(source)), "hub/id")
        return str(raised.value)

    assert f"no such file or folder: {tmp_path}/none" in refused(tmp_path / "none")
    assert "no such file or folder: data/rows.jsonl" in refused("data/rows.jsonl")
    assert "no such file or folder: /dev/null" in refused("/dev/null")
    (tmp_path / "notes.txt").write_text("")
    assert "holds no file of rows (it holds notes.txt)" in refused(tmp_path)
    assert "not a file of rows" in refused(tmp_path / "notes.txt")
    write(tmp_path / "a.jsonl", [{}])
    write(tmp_path / "b.jsonl", [{}])
    assert "does not mark its train and test files (it holds a.jsonl, b.jsonl)" in refused(tmp_path)


@pytest.fixture
def hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a hub dataset is one, of two configurations; `datasets.load_dataset` reads it as it would the hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hub"
    configs = ""
    for config in ("algebra", "geometry"):
        configs += f"- config_name: {config}\n  data_files:\n"
        for split in ("train", "test"):
            write(folder / config / f"{split}.jsonl", [{**MATH_ROW, "type": f"{config} {split}"}])
            configs += f"  - split: {split}\n    path: {config}/{split}.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return folder


def test_a_hub_dataset_gives_the_rows_of_each_split(hub_folder: Path) -> None:
    splits = {split: list(rows) for split, rows in from_hub(str(hub_folder), "geometry").items()}
    assert {split: [row.values["type"] for row in rows] for split, rows in splits.items()} == {
        "train": ["geometry train"],
        "test": ["geometry test"],
    }
    assert splits["test"][0].where == f"{hub_folder}, split test, row 0 (the first is 0)"
    assert splits["test"][0].origin == str(hub_folder)
    with pytest.raises(DataError, match=r"pick one among .*'algebra', 'geometry'.*--source hub$"):
        from_hub(str(hub_folder), None)


def test_parts_of_a_hub_dataset_are_joined_only_for_converters_that_do(hub_folder: Path) -> None:
    # As the converter's own dataset, not as --source, so that the hub's reader is asked.
    joined = read_splits(ConvertOptions(), str(hub_folder), join=True)
    assert {split: len(list(rows)) for split, rows in joined.items()} == {"train": 2, "test": 2}
    splits = read_splits(ConvertOptions(subset="algebra"), str(hub_folder), join=True)
    assert [row["type"] for row in values(splits["train"])] == ["algebra train"]


@pytest.mark.long
def test_without_a_network_the_message_says_how_to_get_the_data() -> None:
    program = (
        "from rlcli_data_prep import gsm8k; from rlcli.types import ConvertOptions\n"
        "for source in (None, 'nobody/nothing'):\n"
        "    try: gsm8k.read(ConvertOptions(source=source))\n"
        "    except Exception as error: print(type(error).__name__, error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    error_line, other = done.stdout.splitlines()
    assert error_line.startswith("DataError openai/gsm8k cannot be loaded from the Hugging Face hub: ")
    assert "(hf download openai/gsm8k --repo-type dataset --local-dir gsm8k)" in error_line
    assert error_line.endswith("give that folder: --source gsm8k")
    assert other.startswith("DataError nobody/nothing cannot be loaded")


ACCENTED = '{"prompt": "1 café?", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "rows.jsonl",
            ACCENTED.encode("utf-16"),
            "rows.jsonl is text in UTF-16, not in UTF-8; convert it: iconv -f UTF-16",
        ),
        ("rows.json", ACCENTED.encode("utf-16-le"), "rows.json is text in UTF-16LE, not in UTF-8"),
        ("rows.csv", "prompt,answer\ncafé,1\n".encode("utf-16"), "rows.csv is text in UTF-16, not in UTF-8"),
        ("rows.jsonl.gz", gzip.compress(ACCENTED.encode("utf-32")), "rows.jsonl.gz is text in UTF-32, not in UTF-8"),
        ("rows.csv", "prompt,answer\ncafé,1\n".encode("latin-1"), "it is not UTF-8 (byte 0xe9"),
        (
            "rows.jsonl",
            ACCENTED.encode() + ACCENTED.encode("latin-1"),
            "rows.jsonl, line 2: it is not UTF-8 (byte 0xe9 at 17)",
        ),
        ("rows.jsonl", (ACCENTED * 2 + "{\n").encode(), "rows.jsonl, line 3: not JSON: Expecting property name"),
        ("rows.jsonl", b"", "rows.jsonl has no rows"),
    ],
    ids=["UTF-16", "UTF-16LE", "CSV in UTF-16", "UTF-32", "Latin-1", "mixed", "broken line", "empty"],
)
def test_a_file_that_cannot_be_read_leaves_nothing_behind(
    tmp_path: Path, name: str, content: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["prep", "jsonl", "--source", str(tmp_path / name), "--out", str(tmp_path / "out" / "deep")]) == 2
    assert says in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_mark_of_utf8_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(ACCENTED.encode("utf-8-sig"))
    (row,) = read_splits(ConvertOptions(source=str(tmp_path / "rows.jsonl")), "")["train"]
    assert row.values == {"prompt": "1 café?", "answer": "1"}
