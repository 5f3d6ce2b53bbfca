"""Inputs that no run could use: one line that names what is wrong and the fix, and exit code 2."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlcli.cli.main import main
from rlcli.data.schema import row, write_rows
from rlcli.data.table import read_prompts
from rlcli.errors import DataError, ModelError, SetupError, VerifierError
from rlcli.model.facts import check_model
from rlcli.model.tiny import make_tiny_model
from rlcli.planner.shape import read_shape
from rlcli.scoring.nursery import Nursery
from rlcli.scoring.spec import parse
from rlcli.trainer.run_folder import RunFolder
from rlcli.workers.cluster import check_local


def error_of(capsys: pytest.CaptureFixture[str], *words: str, expect: int = 2) -> str:
    """The last line that the command prints to standard error."""
    code = main(words)
    last = capsys.readouterr().err.splitlines()[-1]
    assert code == expect, last
    return last


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_attention_heads", 0), ("num_key_value_heads", 0), ("hidden_size", 0), ("num_attention_heads", -2)],
)
def test_a_size_that_no_model_has_is_named(name: str, value: int, model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for read in (check_model, read_shape):
        with pytest.raises(ModelError, match=f"config.json has {name} = {value}, and a model needs 1 or more; use the"):
            read(str(tmp_path))  # type: ignore[operator]


def not_utf8(rows: int, bad: int) -> Any:
    texts = pyarrow.array([b"\xff" if number == bad else b"1" for number in range(rows)], type=pyarrow.binary())
    return pyarrow.StringArray.from_buffers(rows, *texts.buffers()[1:])


@pytest.mark.parametrize("column", ["data_source", "prompt", "reward_model", "extra_info"])
def test_text_that_is_not_utf8_is_named_with_its_row(column: str, tmp_path: Path) -> None:
    file, texts = tmp_path / "train.parquet", not_utf8(5, bad=3)
    messages = [{"role": "user", "content": "1"}]
    write_rows(file, [row(data_source="toy", messages=messages, verifier="gsm8k", ground_truth="1")] * 5)
    table = pyarrow.parquet.read_table(file)
    roles = pyarrow.array(["user"] * 5)
    chats = pyarrow.StructArray.from_arrays([roles, texts], ["role", "content"])
    bad = {
        "data_source": texts,
        "prompt": pyarrow.ListArray.from_arrays(pyarrow.array(range(6), type=pyarrow.int32()), chats),
        "reward_model": pyarrow.StructArray.from_arrays([roles, texts], ["style", "ground_truth"]),
        "extra_info": pyarrow.StructArray.from_arrays([texts], ["note"]),
    }[column]
    kept = table.drop_columns([column]) if column in table.column_names else table
    pyarrow.parquet.write_table(kept.append_column(column, bad), file)
    with pytest.raises(DataError, match=rf"parquet, row 3 \(the first is 0\): '{column}' holds text that is not UTF-8"):
        read_prompts(file, "train")


@pytest.mark.parametrize("json_words", [[], ["--json"]])
def test_binary_files_in_a_run_folder_are_named(
    json_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder.create(tmp_path / "run"):
        pass
    for name in ("config.toml", "events.jsonl", "metrics.jsonl", "environment.json", "evaluations/step-000001.json"):
        (tmp_path / "run" / name).write_bytes(b"\xff\xfe\x00" * 100)
    said = error_of(capsys, "runs", "show", str(tmp_path / "run"), *json_words)
    assert "config.toml cannot be read: it is not text in UTF-8" in said


@pytest.mark.parametrize("home", ["/sys", "/proc", "a_file", "a_file/below"])
def test_a_home_folder_that_cannot_be_written_is_named(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / home))  # of an absolute path, that path
    with pytest.raises(SetupError, match=r"the home folder .* cannot be written to: .*; .*HOME=/some/folder"):
        check_local()


def test_a_home_folder_that_is_not_there_yet_is_none_to_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "new" / "home"))
    check_local()


def test_an_upper_case_recipe_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no recipe is called 'GRPO'; did you mean grpo?" in error_of(capsys, "train", "GRPO", "--model", "m")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"completion": "#### 42", "ground_truth": "42"}\n')
    return file


def test_an_unknown_sandbox_is_named(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(capsys, "verifiers", "run", "gsm8k", "--input", str(rows), "--sandbox", "chess")
    assert "no sandbox is called 'chess'; use auto, bwrap" in said


def test_an_output_never_replaces_its_input(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = rows.read_text()
    (rows.parent / "link.jsonl").symlink_to(rows)
    os.link(rows, rows.parent / "hard.jsonl")
    for name in ("rows.jsonl", "./rows.jsonl", "link.jsonl", "hard.jsonl"):
        output = f"{rows.parent}/{name}"
        said = error_of(capsys, "verifiers", "run", "gsm8k", "--input", str(rows), "--output", output)
        assert f"--output {output} is the file of --input" in said
    assert rows.read_text() == before


def test_a_file_whose_every_verification_crashes_fails(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verifier, scored = rows.parent / "mine.py", rows.parent / "scored.jsonl"
    verifier.write_text("def verify(request):\n    raise ValueError('boom')\n")
    words = ("verifiers", "run", f"{verifier}:verify", "--input", str(rows), "--output", str(scored))
    said = error_of(capsys, *words, expect=1)
    assert "all 1 verifications crashed: ValueError: boom" in said
    assert json.loads(scored.read_text())["outcome"] == "crash"
    rows.write_text(rows.read_text() + '{"completion": "", "ground_truth": "0"}\n')
    half = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1 / int(ground_truth)\n"
    (rows.parent / "half.py").write_text(half)
    assert main(["verifiers", "run", f"{rows.parent / 'half.py'}:compute_score", "--input", str(rows)]) == 0


def rlcli(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlcli.cli.main", *words]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, encoding="utf-8", check=False)


def test_the_c_locale_is_no_obstacle(rows: Path) -> None:
    rows.write_text(json.dumps({"completion": "#### é", "ground_truth": "×"}, ensure_ascii=False), encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = rlcli("verifiers", "list", **plain)
    assert (done.returncode, done.stderr) == (0, "")
    assert "…" in done.stdout
    done = rlcli("verifiers", "show", "×", **plain)
    assert done.returncode == 2
    assert "no verifier is called" in done.stderr


def test_an_interrupt_while_commands_are_imported_is_one_word() -> None:
    code = (
        "import builtins, signal, sys\n"
        "from rlcli.cli.main import main\n"
        "before = builtins.__import__\n"
        "def interrupted(name, *rest, **options):\n"
        "    if name == 'typer':\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    return before(name, *rest, **options)\n"
        "builtins.__import__ = interrupted\n"
        "sys.exit(main(['--help']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import time; time.sleep(600)", "did not answer for 3 s"),
        ("import os; os._exit(3)", r"ended \(exit status 3\)"),
    ],
)
def test_an_import_that_hangs_or_exits_names_the_file(
    code: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcli.scoring.nursery.ANSWER_TIMEOUT_S", 3.0)
    monkeypatch.setattr("rlcli.scoring.nursery._CLOSE_TIMEOUT_S", 0.5)
    (tmp_path / "mine.py").write_text(code)
    with contextlib.closing(Nursery()) as nursery, pytest.raises(VerifierError, match=rf"{says}.*/mine\.py for the"):
        nursery.load(parse(f"{tmp_path}/mine.py:verify"))
