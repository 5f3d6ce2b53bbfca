"""`rlcli recipes`, and the console that all commands print through."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlcli.cli import console
from rlcli.cli.main import main
from rlcli.config.keys import keys
from rlcli.config.load import resolve


def printed_json(capsys: pytest.CaptureFixture[str]) -> object:
    return json.loads(capsys.readouterr().out)


def test_list_shows_each_recipe_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "list"]) == 0
    printed = capsys.readouterr().out
    assert "quickstart" in printed
    assert "Group-relative policy optimisation" in printed


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "list", "--json"]) == 0
    listed = printed_json(capsys)
    assert isinstance(listed, list)
    assert {"grpo", "quickstart"} <= {recipe["name"] for recipe in listed}


def test_show_prints_the_file_as_it_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "quickstart"]) == 0
    printed = capsys.readouterr().out
    assert 'base = "grpo"' in printed
    assert "# One token is one character" in printed


def test_show_resolved_is_a_recipe_with_every_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["recipes", "show", "quickstart", "--resolved", "--set", "lora.rank=8"]) == 0
    printed = capsys.readouterr().out
    sections = {name: table for name, table in tomllib.loads(printed).items() if name != "recipe"}
    assert {f"{section}.{key}" for section, table in sections.items() for key in table} == set(keys()) - {"algorithm.options"}
    (tmp_path / "again.toml").write_text(printed)
    assert resolve(str(tmp_path / "again.toml")).config == resolve("quickstart", sets=["lora.rank=8"]).config


def test_show_as_json_gives_values_and_origins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "grpo", "--set", "train.lr=1e-5", "--json"]) == 0
    shown = printed_json(capsys)
    assert isinstance(shown, dict)
    assert shown["values"]["train.lr"] == 1e-5
    assert shown["origins"]["train.lr"] == "--set"
    assert shown["recipe"]["paper"].endswith("2402.03300")


def test_show_refuses_a_recipe_that_does_not_hold_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[train]\nlr = -1\n")
    assert main(["recipes", "show", str(tmp_path / "bad.toml")]) == 2
    assert "train.lr = -1 (recipe bad) must be a number > 0" in capsys.readouterr().err


def test_explain_one_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "explain", "rollout.kv_cache_mb"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith('rollout.kv_cache_mb = "unset"  (a whole number ≥ 1, or unset)\n    KV cache of one')


def test_explain_everything_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "explain", "--json"]) == 0
    explained = printed_json(capsys)
    assert isinstance(explained, list)
    assert [key["name"] for key in explained] == list(keys())


@dataclass
class Result:
    score: float
    where: Path


def test_json_takes_dataclasses_and_paths_and_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    console.emit_json({"a": Result(float("nan"), Path("x/y")), "b": (1, float("inf")), "ü": "√"})
    text = capsys.readouterr().out
    assert "√" in text
    assert json.loads(text) == {"a": {"score": None, "where": "x/y"}, "b": [1, None], "ü": "√"}


def test_a_table_shows_markup_as_it_is_and_never_shortens_its_first_column(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "a-rather-long-name-of-a-thing"
    console.show(console.table(["name", "text"], [(name, "[bold]" + "word " * 40)]))
    printed = capsys.readouterr().out
    assert name in printed
    assert "[bold]word" in printed
