"""A broken package hides no other package, and its error is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENTRY_POINTS = """
[rlcli.verifiers]
gone = no_such_module:verify
leaves = leaving_module:verify
number = leaving_number:verify
[rlcli.data_prep]
gone = no_such_module:CONVERTER
odd = json:loads
[rlcli.recipes]
gone = no_such_module
"""


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A distribution on the path whose every entry point is broken."""
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "leaving_module.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "leaving_number.py").write_text("verify = 3")
    return tmp_path


def rlcli(broken: Path, *words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    completed = subprocess.run(
        [sys.executable, "-m", "rlcli.cli.main", *words],
        env=os.environ | {"PYTHONPATH": str(broken), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == expect, completed.stderr
    assert "Traceback" not in completed.stderr
    return completed


def test_the_lists_show_what_loads_and_say_what_does_not(broken: Path) -> None:
    verifiers = {row["name"]: row["summary"] for row in json.loads(rlcli(broken, "verifiers", "list", "--json").stdout)}
    assert {"math", "gsm8k", "format"} <= set(verifiers)
    assert "ModuleNotFoundError" in verifiers["gone"]
    assert "SystemExit" in verifiers["leaves"]

    datasets = rlcli(broken, "prep", "list", "--json")
    listed = {row["name"] for row in json.loads(datasets.stdout)}
    assert listed >= {"arithmetic", "gsm8k"}
    assert not listed & {"gone", "odd"}
    assert "note: the dataset 'gone' (broken 1.0, no_such_module:CONVERTER) does not load" in datasets.stderr
    assert "note: the dataset 'odd' (broken 1.0, json:loads) is a function" in datasets.stderr

    recipes = rlcli(broken, "recipes", "list", "--json")
    assert {"grpo", "quickstart"} <= {row["name"] for row in json.loads(recipes.stdout)}
    assert "note: the recipe package 'gone' (broken 1.0, no_such_module) does not load" in recipes.stderr
    # Intact packages still work, and an unknown name mentions the broken package, which may define it.
    rlcli(broken, "recipes", "show", "grpo", "--resolved")
    assert "the recipe package 'gone'" in rlcli(broken, "recipes", "show", "mine", expect=2).stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "why"),
    [("gone", "ModuleNotFoundError"), ("leaves", "SystemExit: 3"), ("number", "it is of type int, not a function")],
)
def test_a_broken_verifier_is_refused_before_anything_is_asked_of_a_model(broken: Path, name: str, why: str) -> None:
    rlcli(broken, "prep", "arithmetic", "--out", str(broken / "sums"), "--count", "4", "--test-count", "2")
    words = ("--data", str(broken / "sums"), "--verifier", name)
    for model in (("--endpoint", "http://127.0.0.1:9/v1"), ("--model", "no/such/model", "--set", "cluster.device=cpu")):
        completed = rlcli(broken, "eval", *model, *words, expect=2)
        line = completed.stderr.splitlines()[-1]
        assert line.startswith(f"error: the verifier '{name}' (")
        assert why in line


def test_a_broken_dataset_is_refused(broken: Path) -> None:
    assert "must publish an rlcli.types.Converter" in rlcli(broken, "prep", "odd", expect=2).stderr
