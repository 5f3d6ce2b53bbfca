"""`rlcli rescore` on the folder of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlcli.cli import console
from rlcli.cli.main import main
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.data.sample_files import sample_row, write_samples
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.runs.folder import RunFolder
from rlcli.types import Outcome, Prompt, Verdict

TRUTHS = ("4", "6", "8")
SUM = "exact(extract=box) + 0.5 * length(target=1)"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of three prompts and two samples: boxed in step 1, plain in step 2; the second sample is wrong."""
    root = tmp_path_factory.mktemp("rescored")
    make_tiny_model(root / "model", hidden=32, layers=1, heads=1, kv_heads=1)
    prompts = [
        Prompt(f"sums:train:{i}", ({"role": "user", "content": f"{i + 2} × 2?"},), "sums", "math", "math", truth)
        for i, truth in enumerate(TRUTHS)
    ]
    write_rows(
        root / "data" / "train.parquet",
        [
            row(data_source="sums", messages=prompt.messages, verifier="math", ground_truth=prompt.ground_truth)
            for prompt in prompts
        ],
    )
    with RunFolder.create(root / "run") as folder:
        folder.write_config(
            f'[model]\npath = "{root / "model"}"\n[data]\npath = "{root / "data"}"\n[train]\nsteps = 2\n'
        )
        for step, form in ((1, "\\boxed{{{}}}"), (2, "{}")):
            rows = [_row(prompt, sample, form, step) for prompt in prompts for sample in range(2)]
            write_samples(folder.samples / f"step-{step:06d}" / "rank-0.parquet", step, rows)
    return root / "run"


def _row(prompt: Prompt, sample: int, form: str, step: int) -> dict[str, Any]:
    right = sample == 0
    response = form.format(prompt.ground_truth if right else "5")
    verdict = Verdict(float(right), Outcome.OK if right else Outcome.WRONG)
    turns = 2 if (step, sample, prompt.id) == (2, 1, "sums:train:2") else 1
    return sample_row(
        prompt, sample, response, verdict, prompt_tokens=5, response_tokens=len(response), finish_reason="stop",
        turns=turns,
    )  # fmt: skip


def rescored(capsys: pytest.CaptureFixture[str], run: Path, *words: str, expect: int = 0) -> Any:
    code = main(["rescore", str(run), "--processes", "1", *words])
    captured = capsys.readouterr()
    assert code == expect, captured.err
    return captured.err if expect or "--json" not in words else json.loads(captured.out)


def test_old_and_new_scores_by_step(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    modified_at = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    output = tmp_path / "out.jsonl"
    summary = rescored(capsys, run, "--verifier", SUM, "--json", "--out", str(output))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == modified_at
    assert (summary["samples"], summary["several_turns"], summary["unknown_prompts"], summary["notes"]) == (
        11,
        1,
        0,
        [],
    )
    first, second = summary["steps"]["1"], summary["steps"]["2"]
    assert (first["old"], first["new"], first["agreement"]) == (0.5, 0.5, 1.0)  # boxes are longer than the target
    assert first["correlation"] == pytest.approx(1.0)
    assert (second["new"], second["agreement"], second["correlation"]) == (0.5, 0.4, None)  # of the lengths alone
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 11
    assert (rows[0]["old_score"], rows[0]["score"], rows[0]["outcome"]) == (1.0, 1.0, "ok")
    assert rows[0]["parts"] == {"exact": 1.0, "length": 0.0}


@pytest.mark.long
def test_a_step_a_limit_and_what_each_row_names(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = rescored(capsys, run, "--verifier", "auto", "--step", "2", "--limit", "3", "--json")
    assert (summary["samples"], list(summary["steps"]), summary["agreement"]) == (3, ["2"], 1.0)
    assert main(["rescore", str(run), "--verifier", "math", "--processes", "1"]) == 0
    assert "correlation" in capsys.readouterr().out


@pytest.mark.long
def test_without_the_data_the_samples_are_enough(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = run.parent / "data"
    data.rename(tmp_path / "elsewhere")
    try:
        summary = rescored(capsys, run, "--verifier", "math", "--step", "1", "--json")
        assert (summary["samples"], summary["agreement"], summary["unknown_prompts"]) == (6, 1.0, 6)
        assert "no such file or folder" in summary["notes"][0]
        assert "has no row sums:train:0 (" in rescored(capsys, run, "--verifier", "auto", expect=2)
    finally:
        (tmp_path / "elsewhere").rename(data)


def test_what_cannot_be_scored_is_one_line(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "has no samples of step 7; it has steps 1 to 2" in rescored(
        capsys, run, "--verifier", "math", "--step", "7", expect=2
    )
    assert "evaluations has no samples" in rescored(capsys, run, "--verifier", "math", "--evaluations", expect=2)
    assert "did you mean math?" in rescored(capsys, run, "--verifier", "maths", expect=2)
    inside = run / "samples" / "new.jsonl"
    assert "lies in the folder of the run" in rescored(
        capsys, run, "--verifier", "math", "--out", str(inside), expect=2
    )
    ranked = "bad_verifiers:ranked(other_responses=2)"
    refused = rescored(capsys, run, "--verifier", ranked, expect=2)
    assert "compares the responses of a group, but rlcli rescore has none" in refused
    assert "is not a run" in rescored(capsys, tmp_path, "--verifier", "math", expect=2)


def test_a_verifier_that_crashes_ends_it_before_anything_is_written(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def verify(request):\n    return [][1]\n")
    files = set(run.rglob("*"))
    stderr = rescored(capsys, run, "--verifier", f"{tmp_path}/mine.py:verify", "--keep", expect=2)
    assert (
        "crashes on each of the 8 responses that were tried; on that of step 1 to sums:train:0: IndexError: " in stderr
    )
    assert f"({tmp_path}/mine.py, line 2, in verify: return [][1]); the response: " in stderr
    assert set(run.rglob("*")) == files


def test_kept_scores_are_a_signal_of_the_run(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    rescored(capsys, copy, "--verifier", SUM, "--keep", "--json")
    (scores_file,) = (copy / "rescored").iterdir()
    assert scores_file.name == "exact-extract-box-+-0.5-length-target-1.jsonl"
    assert len(scores_file.read_text().splitlines()) == 11
    assert "leave out the other flag" in rescored(
        capsys, copy, "--verifier", "math", "--keep", "--evaluations", expect=2
    )
    # Six steps; the responses rewarded in the last three get no reward from the other verifier.
    rows = [json.loads(line) for line in scores_file.read_text().splitlines()]
    scored = [
        row | {"step": step, "old_score": float(step > 3), "score": 0.0} for step in range(1, 7) for row in 6 * rows
    ]
    scores_file.write_text("".join(json.dumps(row) + "\n" for row in scored))
    monkeypatch.setenv("COLUMNS", "120")
    console.stdout.cache_clear()
    assert main(["runs", "signals", str(copy)]) == 0
    console.stdout.cache_clear()
    stdout = capsys.readouterr().out
    assert "An independent verifier disagrees" in stdout
    assert "verifier: warning" in stdout
    assert "scored 1, by the other verifier 0" in stdout
    assert main(["runs", "signals", str(copy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["signals"][0]["name"] == "verifier"
    assert main(["runs", "signals", str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err
