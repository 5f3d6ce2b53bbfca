"""`rlcli runs compare`: curves, paired evaluations, changed prompts, and what cannot be compared."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rlcli_inspect.report.comparison import MAX_STEPS, RunComparison, compare
from rlcli_inspect.report.curves import MAX_POINTS, curves_of

from rlcli.cli.main import main
from rlcli.config.load import dump_toml, resolve
from rlcli.data.sample_files import sample_row, write_samples
from rlcli.errors import RlcliError
from rlcli.runs.folder import RunFolder
from rlcli.types import Outcome, Prompt, Verdict


def make_run(
    path: Path,
    rewards: list[float],
    evaluations: Mapping[int, Mapping[int, str]],
    recipe: str = "grpo",
    sets: tuple[str, ...] = (),
    question: str = "{}+1=",
) -> Path:
    """evaluations: step → prompt → a letter a sample, r right or w wrong."""
    with RunFolder.create(path) as folder:
        folder.write_config(dump_toml(resolve(recipe, {"train.steps": len(rewards)}, list(sets))))
        for step, reward in enumerate(rewards, 1):
            line = {"step": step, "reward/mean": reward, "rollout/generated": 4, "response_tokens/mean": 2.5 * step}
            folder.append_metrics(line | {"time/step_s": 2.0, "time/evaluate_s": 1.0 if step == 2 else 0.0})
        for step, prompts in evaluations.items():
            rows = [
                sample_row(
                    Prompt(f"sums:test:{n}", ({"role": "user", "content": question.format(n)},), "", "", "", str(n)),
                    sample,
                    f"{path.name} is \x1b[31m{letter}",
                    Verdict(float(letter == "r"), Outcome.OK if letter == "r" else Outcome.WRONG),
                    prompt_tokens=4,
                    response_tokens=2,
                    finish_reason="stop",
                )
                for n, letters in prompts.items()
                for sample, letter in enumerate(letters)
            ]
            write_samples(folder.evaluations / f"step-{step:06d}" / "rank-0.parquet", step, rows)
            folder.write_evaluation(step, {"headline": "", "pass": {"pass@1": {"mean": 0.5}}})
        folder.event("finished", step=len(rewards))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    first = {0: {0: "ww", 1: "ww"}, 3: {0: "rr", 1: "rw", 2: "ww", 3: "rr"}}
    second = {0: {0: "ww", 1: "ww"}, 3: {0: "rr", 1: "rr", 2: "rr", 3: "wr"}, 4: {0: "rr"}}
    return (
        make_run(tmp_path / "a", [0.0, 0.5, 0.75], first),
        make_run(tmp_path / "b", [0.25, 0.5, 1.0, 1.0], second, sets=("train.lr=0.5",)),
    )


def curve(comparison: RunComparison, title: str, x: str) -> dict[str, list[list[float]]]:
    match = next(c for c in comparison.as_dict()["curves"] if (c["title"], c["x"]) == (title, x))
    return {series["run"]: series["points"] for series in match["series"]}


def test_curves_by_step_by_tokens_and_by_seconds(runs: tuple[Path, Path]) -> None:
    comparison = compare(*runs)
    assert curve(comparison, "Reward", "step") == {
        "a": [[1, 0.0], [2, 0.5], [3, 0.75]],
        "b": [[1, 0.25], [2, 0.5], [3, 1.0], [4, 1.0]],
    }
    assert curve(comparison, "Reward", "tokens")["a"] == [[10, 0.0], [30, 0.5], [60, 0.75]]
    assert curve(comparison, "Reward", "seconds")["a"] == [[2, 0.0], [5, 0.5], [7, 0.75]]
    assert not any(c.title == "Entropy in nats" for c in comparison.curves)


def test_evaluations_of_the_same_step_are_paired_by_prompt(runs: tuple[Path, Path]) -> None:
    comparison = compare(*runs).as_dict()
    last = next(row for row in comparison["evaluations"] if row["step"] == 3 and row["metric"] == "pass@1")
    assert {row["step"] for row in comparison["evaluations"]} == {0, 3}
    assert (last["prompts"], last["a"]["mean"], last["b"]["mean"], last["difference"]["mean"]) == (
        4,
        0.625,
        0.875,
        0.25,
    )
    for name in ("a", "b", "difference"):
        assert last[name]["low"] < last[name]["mean"] < last[name]["high"]


def test_changed_prompts_have_both_responses_of_the_usual_outcome(runs: tuple[Path, Path]) -> None:
    comparison = compare(*runs).as_dict()["changed"]
    assert [(row["prompt_id"], row["difference"]) for row in comparison] == [
        ("sums:test:2", 1.0),
        ("sums:test:1", 0.5),
        ("sums:test:3", -0.5),
    ]
    assert comparison[0]["prompt"] == "2+1="
    assert comparison[0]["a"] == {"pass_rate": 0.0, "response": "a is \x1b[31mw", "score": 0.0}
    assert comparison[2]["b"] == {"pass_rate": 0.5, "response": "b is \x1b[31mr", "score": 1.0}


def test_the_configuration_is_the_keys_that_differ(runs: tuple[Path, Path]) -> None:
    config = {row["key"]: (row["a"], row["b"]) for row in compare(*runs).as_dict()["config"]}
    assert config == {"train.lr": (1e-6, 0.5), "train.steps": (3, 4)}


def test_runs_of_different_data_are_compared_as_far_as_it_goes(runs: tuple[Path, Path], tmp_path: Path) -> None:
    sets = ("data.path=elsewhere", 'verifier.name="math"')
    other = make_run(tmp_path / "c", [0.5, 0.5], {3: {0: "rr", 1: "rr"}}, "rloo", sets, question="{}-1=")
    comparison = compare(runs[0], other)
    assert comparison.evaluations == []
    assert comparison.changed == []
    assert len(curve(comparison, "Reward", "step")) == 2
    notes = " · ".join(comparison.notes)
    assert "train on different data" in notes
    assert "different verifiers (auto; math)" in notes
    assert "prompts with the same id differ" in notes


def test_without_a_common_step_the_last_evaluations_are_paired(runs: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_run(tmp_path / "c", [0.5], {7: {0: "wr", 3: "ww"}})
    comparison = compare(runs[0], other).as_dict()
    assert {(row["step"], row["step_b"]) for row in comparison["evaluations"]} == {(3, 7)}
    assert any("after step 3 of A, step 7 of B" in note for note in comparison["notes"])
    longer = make_run(tmp_path / "d", [0.5], {0: {0: "ww"}, 7: {0: "wr", 3: "ww"}})
    assert {row.steps for row in compare(runs[0], longer).evaluations} == {(0, 0), (3, 7)}


def test_a_half_written_run_shows_what_there_is(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (runs[0] / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    (runs[0] / "evaluations" / "step-000003" / "rank-0.parquet").write_bytes(b"PAR1 broken")
    comparison = compare(*runs)
    assert curve(comparison, "Reward", "step")["a"] == [[1, 0.5]]
    assert {row.steps for row in comparison.evaluations} == {(0, 0)}
    truncated, note = comparison.notes
    assert truncated == "a: metrics.jsonl: the last line is incomplete and left out"
    unread = "a/evaluations/step-000003/rank-0.parquet cannot be read as parquet"
    assert note.startswith(f"the evaluations after step 3 are not paired: {unread}")
    (runs[1] / "metrics.jsonl").unlink()
    assert main(["runs", "compare", *map(str, runs)]) == 0
    assert "b has no metrics of a step" in capsys.readouterr().out


def test_samples_without_a_score_are_not_paired(runs: tuple[Path, Path]) -> None:
    for file in runs[1].glob("evaluations/step-000003/rank-*.parquet"):
        table = pq.read_table(file)
        scores = pa.nulls(len(table), pa.float64())
        pq.write_table(table.set_column(table.column_names.index("score"), "score", scores), file)
    (note,) = compare(*runs).notes
    assert re.search(r"after step 3 are not paired: .* \d+ samples of b/evaluations/step-000003 have no score", note)


def test_long_runs_are_thinned() -> None:
    lines = [{"step": step, "reward/mean": step / 10_000} for step in range(1, 10_001)]
    points = curves_of([("a", lines)])[0].series[0].points
    assert len(points) == MAX_POINTS
    assert points[-1][0] == 10_000
    assert points == sorted(points)


def test_many_evaluations_are_compared_evenly(tmp_path: Path) -> None:
    evaluations: dict[int, Any] = {step: {0: "r"} for step in range(0, 60, 2)}
    folders = [make_run(tmp_path / name, [0.5], evaluations) for name in "ab"]
    steps = [row.steps[0] for row in compare(*folders).evaluations if row.metric == "pass@1"]
    assert len(steps) == MAX_STEPS
    assert (steps[0], steps[-1]) == (0, 58)


def test_the_terminal_shows_no_control_characters(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlcli.cli.console import stdout

    monkeypatch.setenv("COLUMNS", "200")
    stdout.cache_clear()
    assert main(["runs", "compare", *map(str, runs)]) == 0
    stdout.cache_clear()
    printed = capsys.readouterr().out
    assert "A: a (grpo, finished, step 3)" in printed
    assert "+25.0 [" in printed
    assert "generated tokens" in printed
    assert "train.lr" in printed
    assert "\x1b" not in printed
    assert main(["runs", "compare", *map(str, runs), "--changed", "1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["changed"]) == 1


def test_a_folder_that_is_no_run_is_one_line(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RlcliError, match="is not a run: it has neither config"):
        compare(runs[0], tmp_path)
    assert main(["runs", "compare", str(runs[0]), str(tmp_path / "missing")]) == 2
    assert "is not a run: no such folder" in capsys.readouterr().err
