"""The next command at the end of a command, and the result of a run in rounded figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from rlcli_quickstart.quickstart_command import TASKS

from rlcli.cli.next_commands import after_evaluation, after_export, after_prep, after_training, print_next
from rlcli.cli.train.checked_run import print_result
from rlcli.config.load import dump_toml, resolve
from tests.page_commands import Shown, complaint


def run_of(folder: Path, flags: dict[str, object], *sets: str, recipe: str = "grpo") -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(dump_toml(resolve(recipe, flags, sets)))
    return folder


def commands(pairs: list[tuple[str, str]]) -> list[str]:
    import shlex

    for command, _ in pairs:
        assert complaint(Shown(Path(__file__), shlex.split(command), False)) == ""
    return [command for command, _ in pairs]


def outcome(run: Path, **changes: Any) -> dict[str, Any]:
    rewards = [0.12031250000000002, 0.5, 0.8]
    return {
        "out": str(run),
        "steps": 3,
        "stopped": False,
        "checkpoint": "",
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "rewards": rewards,
        "evaluations": {3: {"headline": "pass@1 50.0%"}},
    } | changes


def test_a_finished_run_is_looked_at_evaluated_and_exported(tmp_path: Path) -> None:
    sets = ("rollout.max_response_tokens=40", "verifier.name=mine.py:reward")
    run = run_of(tmp_path / "my run", {"data.path": "sums", "evaluation.data": ("sums", "more")}, *sets)
    assert commands(after_training(run, stopped=False)) == [
        f"rlcli view '{run}'",
        f"rlcli eval --model '{run}' --data sums --data more --verifier mine.py:reward --max-tokens 40",
        f"rlcli export '{run}' --out my-model",
    ]
    game = run_of(tmp_path / "game", {"environment.name": "guess_number"}, "environment.options.high=16")
    assert commands(after_training(game, stopped=False))[1] == (
        f"rlcli eval --model {game} --environment guess_number --set environment.options.high=16"
    )
    warm = run_of(tmp_path / "warm", {"data.path": "sums", "verifier.name": "a.py:b"}, recipe="sft")
    assert commands(after_training(warm, stopped=False))[-1] == (
        f"rlcli train grpo --model {warm} --data sums --verifier a.py:b --dry-run"
    )


@pytest.mark.parametrize("task", TASKS)
def test_the_quickstarts_next_commands_exist(task: str) -> None:
    lines = TASKS[task].next.format(run="runs/first", model="runs/first", data="data").splitlines()
    assert len(lines) >= 4
    commands([(re.split(r"\s{3,}", line.strip())[0], "") for line in lines])


def test_a_shell_that_does_not_find_rlcli_is_told_how(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    print_next([("rlcli recipes list", "all recipes")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["source", ".venv/bin/activate"]
    assert "rlcli recipes list" in lines[2]
    (tmp_path / "rlcli").write_text("#!/bin/sh\n")
    (tmp_path / "rlcli").chmod(0o755)
    print_next([("rlcli recipes list", "all recipes")])
    assert len(capsys.readouterr().out.splitlines()) == 2
    print_next([("rlcli eval --model runs/grpo-1 --data data/x --max-tokens 40", "how good the model is")])
    assert capsys.readouterr().out.splitlines()[2] == "      how good the model is"


def test_a_stopped_run_is_continued(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {"data.path": "sums"})
    assert commands(after_training(run, stopped=True))[0] == f"rlcli train --resume {run}"


def test_data_exports_and_evaluations_have_a_next_command() -> None:
    assert commands(after_prep(Path("data/x"), "math", trains=True)) == [
        "rlcli train grpo --model MODEL --data data/x --dry-run"
    ]
    assert "--verifier FILE.py:FUNCTION" in commands(after_prep(Path("data/x"), "", trains=True))[0]
    assert commands(after_prep(Path("data/x"), "math", trains=False)) == ["rlcli eval --model MODEL --data data/x"]
    assert commands(after_export("mine", "model")) == ["rlcli chat mine", "rlcli eval --model mine --data …"]
    assert len(after_export("mine", "adapter")) == 1
    assert after_export("mine", "value model") == []
    assert commands(after_evaluation(Path("evals/a"))) == ["rlcli eval compare evals/OTHER evals/a"]
    assert "--out" in after_evaluation(None)[0][0]


def test_a_result_is_rounded_and_json_has_the_whole_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlcli.cli.next_commands.shutil.which", lambda name: f"/usr/bin/{name}")
    run = run_of(tmp_path / "run", {"data.path": "sums"})
    print_result(outcome(run), as_json=False)
    printed = capsys.readouterr().out
    assert "0.120 → 0.800 (first → last step)" in printed
    assert "stopped" not in printed
    assert "12031250" not in printed
    assert f"next:\n  rlcli view {run}" in printed
    print_result(outcome(run), as_json=True)
    assert json.loads(capsys.readouterr().out)["reward_first"] == 0.12031250000000002
    with pytest.raises(typer.Exit) as exit_error:
        print_result(outcome(run, stopped=True, steps=1, reward_first=None, reward_last=None), as_json=False)
    assert exit_error.value.exit_code == 130
    printed = capsys.readouterr().out
    assert "1, stopped" in printed
    assert f"rlcli train --resume {run}" in printed
