"""Imports of plugins that hang or exit: of an algorithm's file, and of packages by entry point."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from rlcli.algorithms.function_registry import load_plugins
from rlcli.algorithms.plugins import load_file
from rlcli.cli.main import main
from rlcli.config import recipes
from rlcli.prep.pipeline import CONVERTERS
from rlcli.rewards.verifier_registry import VERIFIERS
from rlcli.support import importing

HANGS, EXITS = "import time; time.sleep(600)", "import os; os._exit(0)"
ASKS = "input('licence key: ')"
HANGING, EXITING = "does not end its import in 0.5 s", "ends the process that imports it (exit status 0)"
WAYS = pytest.mark.parametrize(("code", "says"), [(HANGS, HANGING), (EXITS, EXITING)])


@pytest.fixture(autouse=True)
def soon(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import timeout is half a second."""
    importing.import_problem.cache_clear()
    monkeypatch.setattr(importing, "_trusted", False)
    if "time.sleep" in request.node.name or "input" in request.node.name:
        monkeypatch.setattr(importing, "IMPORT_TIMEOUT_S", 0.5)


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code, stderr = main(words), capsys.readouterr().err
    assert (code, stderr.count("\n")) == (2, 1), stderr
    return stderr


def publish(monkeypatch: pytest.MonkeyPatch, registry: Any, folder: Path, code: str, module: str) -> None:
    (folder / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    entry = EntryPoint("mine", f"{module}:it", registry.group)
    monkeypatch.setattr(registry, "_published", {**registry._published, "mine": entry})


@pytest.mark.parametrize(
    ("code", "says"),
    [(HANGS, HANGING), (EXITS, EXITING), (ASKS, HANGING), ("import os; os.abort()", "(signal 6: Aborted)")],
)
def test_an_algorithms_file_is_named(code: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(code)
    words = ("plan", "grpo", "--set", f"algorithm.code={tmp_path}/mine.py", "--model", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    message = error_of(capsys, *words)
    assert f"error: algorithm.code = '{tmp_path}/mine.py' " in message
    assert f"{says}; check what the file does when it is imported" in message


SIZES = {"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 64, "architectures": ["Qwen2ForCausalLM"]}


@WAYS
def test_a_package_of_algorithms_is_named(
    code: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hung_algorithms.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("mine", "hung_algorithms", "rlcli.algorithms")
    monkeypatch.setattr("rlcli.algorithms.function_registry.entry_points", lambda group: [entry])
    load_plugins.cache_clear()
    message = error_of(capsys, "recipes", "explain", "algorithm.loss")
    load_plugins.cache_clear()
    assert f"the package of algorithms 'mine' (hung_algorithms) {says}" in message


@WAYS
def test_a_dataset_is_named(
    code: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(monkeypatch, CONVERTERS, tmp_path, code, f"dataset_{len(code)}")
    message = error_of(capsys, "prep", "mine", "--out", str(tmp_path / "out"))
    assert "the dataset 'mine' (local, dataset_" in message
    assert f"{says}; see what it does when it is imported, or remove that package" in message


@WAYS
def test_a_package_of_recipes_is_named(
    code: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(monkeypatch, recipes.PACKAGES, tmp_path, code, f"recipes_{len(code)}")
    assert says in error_of(capsys, "recipes", "show", "some-recipe")
    assert main(["recipes", "show", "grpo"]) == 0  # it stands in the way of no other


@WAYS
def test_a_verifier_that_is_shown_is_named(
    code: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(monkeypatch, VERIFIERS, tmp_path, code, f"verifiers_{len(code)}")
    file = tmp_path / f"verifiers_{len(code)}.py"
    for name in ("mine", f"{file}:verify"):
        message = error_of(capsys, "verifiers", "show", name)
        assert f"the verifier '{name}' " in message
        assert says in message


def test_a_file_is_tried_once_and_in_workers_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, count = tmp_path / "mine.py", tmp_path / "count"
    file.write_text(f"with open({str(count)!r}, 'a') as file: file.write('x')")
    load_file(str(file))
    assert count.read_text() == "xx"  # in the other process, and in this one
    load_file(str(file))
    assert count.read_text() == "xxx"
    importing.trust_imports()
    importing.import_problem.cache_clear()
    load_file(str(file))
    assert count.read_text() == "xxxx"
    assert sys.modules.pop("rlcli_user_mine")
