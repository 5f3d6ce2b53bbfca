"""`rlcli runs list` and `show`: what folders tell of runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.cli.main import main
from rlcli.config.load import dump_toml, resolve
from rlcli.runs.folder import RunFolder
from rlcli.runs.listing import run_at, runs_in, state_of
from tests.shown_runs import HOSTILE, add_samples, make_run, row


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, ends in {"a": ["finished"], "b": ["stopped", "resumed"], "c": ["failed"], "d": ["stopped"]}.items():
        with RunFolder.create(tmp_path / name) as folder:
            folder.write_config(dump_toml(resolve("dapo", {"train.steps": 70}, ["train.lr=0.5"])))
            folder.event("started")
            folder.append_metrics({"step": 0, "eval/pass@1": 0.25})
            folder.append_metrics({"step": 3, "reward/mean": 0.5})
            report = {
                "headline": "pass@1 25.0%",
                "pass": {"pass@1": {"mean": 0.25}},
                "mean": {"mean@4": {"mean": 0.25}},
            }
            (folder.evaluations / "step-000000.json").write_text(json.dumps(report))
            for event in ends:
                folder.event(event, step=3)
    (tmp_path / "data").mkdir()
    return tmp_path


def test_a_run_is_told_at_a_glance(runs: Path) -> None:
    run = run_at(runs / "a")
    assert (run.name, run.recipe, run.state, run.step, run.steps, run.reward) == ("a", "dapo", "finished", 3, 70, 0.5)
    assert (run.evaluated, run.pass_at_1, run.mean_at_1, run.checkpoint) == (0, 0.25, 0.25, None)


def test_how_a_run_ended_is_told_by_its_last_attempt(runs: Path) -> None:
    states = {run.name: run.state for run in runs_in(runs)}
    assert states == {"a": "finished", "b": "killed", "c": "failed", "d": "stopped"}
    assert [run.name for run in runs_in(runs)] == ["d", "c", "b", "a"]
    with RunFolder.resume(runs / "c"):
        assert state_of(runs / "c") == "alive"
    assert state_of(runs / "c") == "failed"


def test_what_is_odd_in_one_run_does_not_hide_the_others(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("step-000003", "step-000003-good"):
        (runs / "a" / "checkpoints" / name).mkdir()
        (runs / "a" / "checkpoints" / name / "manifest.json").write_text("{}")
    (runs / "b" / "evaluations" / "step-000003.json").write_text("{}")
    (runs / "b" / "metrics.jsonl").open("a").write("7\n{}\n")
    (runs / "c" / "config.toml").write_text("train = 3\n")
    (runs / "d" / "events.jsonl").open("a").write('{"event": "stopped"}\n')
    assert {run.name: (run.checkpoint, run.step) for run in runs_in(runs)} == {
        "a": (3, 3),
        "b": (None, 3),
        "c": (None, 3),
        "d": (None, 3),
    }
    for name in "abcd":
        assert main(["runs", "show", str(runs / name)]) == 0


def test_a_run_has_one_line_in_a_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlcli.cli.console import stdout

    monkeypatch.setenv("COLUMNS", "80")
    stdout.cache_clear()
    (runs / "a").rename(runs / "grpo-12")
    (runs / "grpo-12" / "checkpoints" / "step-000100").mkdir()
    (runs / "grpo-12" / "checkpoints" / "step-000100" / "manifest.json").write_text("{}")
    assert main(["runs", "list", str(runs)]) == 0
    stdout.cache_clear()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) == 2 + 4


def test_runs_are_listed_and_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list", str(runs)]) == 0
    assert "25.0%" in capsys.readouterr().out
    assert main(["runs", "show", str(runs / "b"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"] == {
        "train.steps": {"value": 70, "origin": "flag --steps"},
        "train.lr": {"value": 0.5, "origin": "--set"},
    }
    assert [event["event"] for event in shown["events"]] == ["started", "stopped", "resumed"]
    assert main(["runs", "show", str(runs / "b")]) == 0
    assert "flag --steps" in capsys.readouterr().out
    assert main(["runs", "show", str(runs / "data")]) == 2
    assert "is not a run: it has neither config.toml nor" in capsys.readouterr().err


def test_listing_runs_imports_nothing_heavy(runs: Path) -> None:
    code = (
        f"import sys; from rlcli.cli.main import main; main(['runs', 'list', {str(runs)!r}]); "
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_run_on_given_responses_is_told_by_its_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "sft-1", "sft")
    run = run_at(tmp_path / "sft-1")
    assert (run.reward, run.loss) == (None, 1.0)
    assert main(["runs", "list", str(tmp_path)]) == 0
    assert "loss 1" in capsys.readouterr().out
    assert main(["runs", "show", str(tmp_path / "sft-1")]) == 0
    shown = capsys.readouterr().out
    assert "loss (nats a token)\n3.00 ┤" in shown
    assert "reward" not in shown


def test_a_run_is_shown_with_its_curve_its_time_and_its_last_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "grpo-1")
    add_samples(folder, 1, [row("1", 0, "early", 0.0)])
    add_samples(folder, 2, [row("4", 0, "It is 4", 1.0), row("4", 1, "same prompt", 1.0), row("9", 0, HOSTILE, 0.0)])
    assert main(["runs", "show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "mean reward\n0.30 ┤" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["update", "3.00", "75%", "2,000"] in rows
    assert ["generate", "1.00", "25%", "1,000"] in rows
    assert "engine and trainer disagree (step 2, name mismatch)" in " ".join(shown.split())
    assert "assistant: It is 4" in shown
    assert r"assistant: \x1b[2J" in shown
    assert "same prompt" not in shown
    assert "early" not in shown
    assert main(["runs", "show", str(folder), "--json", "--samples", "1"]) == 0
    run_data = json.loads(capsys.readouterr().out)
    assert (run_data["measure"], run_data["course"]) == ("reward", [0.1, 0.2, 0.3])
    assert run_data["phases"] == {
        "update": {"seconds": 3.0, "tokens_per_s": 2000.0},
        "generate": {"seconds": 1.0, "tokens_per_s": 1000.0},
    }
    assert [sample["prompt_id"] for sample in run_data["samples"]] == ["a:train:4"]


def test_where_scores_are_graded_the_mean_is_listed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = {"pass": {"pass@1": {"mean": 1.0}}, "mean": {"mean@1": {"mean": 0.125}}}
    (runs / "a" / "evaluations" / "step-000003.json").write_text(json.dumps(report))
    assert main(["runs", "list", str(runs)]) == 0
    printed = capsys.readouterr().out
    assert "mean@1" in printed
    assert "0.125" in printed
    assert main(["runs", "list", str(runs), "--json"]) == 0
    (run,) = [run for run in json.loads(capsys.readouterr().out) if run["name"] == "a"]
    assert (run["pass_at_1"], run["mean_at_1"]) == (1.0, 0.125)
