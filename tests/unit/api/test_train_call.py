"""`rlcli.train` and `rlcli.evaluate`: the same options as the commands, and where a function's source is stored."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlcli
from rlcli.api.function_verifier import stored_in_evaluation, stored_in_run
from rlcli.api.stored_rows import is_rows, stored_rows
from rlcli.cli.eval.eval import evaluate as eval_command
from rlcli.cli.train.train import train as train_command
from rlcli.config.load import dump_toml, resolve
from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.errors import ConfigError, DataError, RlcliError, VerifierError
from rlcli.rewards.expression import parse
from rlcli.runs.folder import RunFolder
from rlcli.types import VerifyRequest


def digits(request: VerifyRequest) -> float:
    return float(request.completion.isdigit())


@pytest.mark.parametrize(
    ("function", "command", "only_there"),
    [
        (rlcli.train, train_command, {"sets", "dry_run", "whole_plan", "as_json", "go_on"}),
        (rlcli.evaluate, eval_command, {"context", "sets", "as_json"}),
    ],
)
def test_a_function_takes_the_options_of_its_command(
    function: Callable[..., Any], command: Callable[..., Any], only_there: set[str]
) -> None:
    options = set(inspect.signature(command).parameters) - only_there
    assert set(inspect.signature(function).parameters) == options | {"settings"}


def test_importing_the_package_imports_nothing_of_it() -> None:
    code = (
        "import sys, rlcli\n"
        "assert 'Run' in dir(rlcli) and not hasattr(rlcli, 'nothing')\n"
        "loaded = [name for name in sys.modules if name.startswith('rlcli.')]\n"
        "assert not loaded, loaded\n"
        "rlcli.train, rlcli.evaluate, rlcli.Run, rlcli.Verdict\n"
        "heavy = {'torch', 'ray', 'pydantic', 'numpy', 'pyarrow', 'typer', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_has_a_type_and_is_there() -> None:
    text = Path(rlcli.__file__).with_suffix(".pyi").read_text()
    for name in rlcli.__all__:
        assert getattr(rlcli, name) is not None
        assert f" as {name}\n" in text or f"{name}: " in text


def test_a_function_is_stored_in_the_folder_of_its_run(tmp_path: Path) -> None:
    run = tmp_path / "my runs" / "first"
    with stored_in_run(digits, run, force=False) as expression:
        (term,) = parse(expression).located().terms
        assert term.ref == f"{run}/code/digits.py:digits"
        with RunFolder.create(run) as folder:
            folder.write_config(dump_toml(resolve("grpo", {"verifier.name": expression})))
    assert "def digits" in (run / "code" / "digits.py").read_text()


def test_a_run_that_does_not_come_to_be_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    with pytest.raises(DataError), stored_in_run(digits, run, force=False):
        raise DataError("no data")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_keeps_its_function(tmp_path: Path) -> None:
    run = tmp_path / "first"

    def fail() -> None:
        with stored_in_run(digits, run, force=False) as expression, RunFolder.create(run) as folder:
            folder.write_config(dump_toml(resolve("grpo", {"verifier.name": expression})))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert (run / "code" / "digits.py").is_file()


def test_the_function_of_a_run_that_might_be_replaced_stays(tmp_path: Path) -> None:
    run = tmp_path / "first"
    with stored_in_run(digits, run, force=False) as expression, RunFolder.create(run) as folder:
        folder.write_config(dump_toml(resolve("grpo", {"verifier.name": expression})))
        folder.append_metrics({"step": 1})
    stored_source = (run / "code" / "digits.py").read_text()
    with pytest.raises(RlcliError, match="already holds a run"), stored_in_run(digits, run, force=False):
        pass

    def other(request: VerifyRequest) -> float:
        return 0.0

    def fail() -> None:
        with stored_in_run(other, run, force=True) as expression:
            assert expression.endswith("code/other-2.py:other")
            raise DataError("no data")

    (run / "code" / "other.py").write_text("another function of that name")
    with pytest.raises(DataError):
        fail()
    assert sorted(path.name for path in (run / "code").iterdir()) == ["digits.py", "other.py"]
    assert (run / "code" / "digits.py").read_text() == stored_source


def test_a_function_is_stored_once_in_an_evaluation(tmp_path: Path) -> None:
    with stored_in_evaluation(digits, tmp_path / "out") as first:
        pass
    with stored_in_evaluation(digits, tmp_path / "out") as second:
        assert first == second
    with pytest.raises(DataError), stored_in_evaluation(digits, tmp_path / "other"):
        raise DataError("no data")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_function_that_cannot_be_stored_leaves_no_folder(tmp_path: Path) -> None:
    for call in (rlcli.train, rlcli.evaluate):
        with pytest.raises(VerifierError, match="is a lambda"):
            call("grpo", out=tmp_path / "run", verifier=lambda request: 1.0)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_has_its_verifier() -> None:
    with pytest.raises(ConfigError, match="resume = runs/x: the run has its verifier"):
        rlcli.train(resume="runs/x", verifier=digits)


@pytest.mark.long
def test_the_error_of_a_command_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such file or folder: nowhere"):
        rlcli.train("grpo", model="tiny", data={"nowhere": 2, "elsewhere": 1}, verifier=digits)
    assert list(tmp_path.iterdir()) == []


ROWS = [{"prompt": f"{n} + 1 =", "answer": n + 1, "level": n} for n in range(3)]


def rows_in(kind: str) -> Any:
    if kind == "dataset":
        import datasets

        return datasets.Dataset.from_list(ROWS)
    if kind == "frame":
        import pandas

        return pandas.DataFrame(ROWS)
    return ROWS


@pytest.mark.parametrize("kind", ["dataset", "frame", "list"])
def test_rows_are_stored_in_the_folder_of_their_run(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "first"
    assert is_rows(rows_in(kind))
    with stored_rows({"train": rows_in(kind), "test": ROWS[:1]}, run, force=False) as paths:
        assert paths == {name: str(run / "data" / f"{name}.parquet") for name in ("train", "test")}
        with RunFolder.create(run) as folder:
            folder.write_config(dump_toml(resolve("grpo", {"data.path": paths["train"]})))
    prompts = list(read_prompts(run / "data", "train", "gsm8k"))
    assert [(row.messages[0]["content"], row.ground_truth) for row in prompts] == [
        (row["prompt"], str(row["answer"])) for row in ROWS
    ]
    assert [row.extra_info["level"] for row in prompts] == [0, 1, 2]
    assert [row.extra_info["answer"] for row in prompts] == [1, 2, 3]


def test_rows_of_a_run_that_does_not_come_to_be_are_removed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    with pytest.raises(DataError), stored_rows({"train": ROWS}, run, force=False):
        raise DataError("no model")
    assert list(tmp_path.iterdir()) == []
    with stored_rows({"train": ROWS}, run, force=False), stored_in_run(digits, run, force=False):
        pass
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == ["code", "data"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([{"question": "1+1="}], r"row 0 of the data: no column 'prompt' .*; rename its columns to prompt and answer"),
        (
            {"train": ROWS, "test": ROWS},
            r"data is a dict of datasets \(train, test\); give one: data=DATASET\['train'\]",
        ),
    ],
)
def test_rows_that_cannot_be_used_leave_no_folder(tmp_path: Path, data: Any, says: str) -> None:
    with pytest.raises(RlcliError, match=says):
        rlcli.train("grpo", model="none", data=data, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_resumed_has_its_rows() -> None:
    with pytest.raises(ConfigError, match="the run has its data; leave data and eval_data out"):
        rlcli.train(resume="run", data=ROWS)


def test_paths_are_no_rows() -> None:
    for data in (None, "data/gsm8k", Path("data"), ["a", "b"], {"a": 1.0}, [], ()):
        assert not is_rows(data)
