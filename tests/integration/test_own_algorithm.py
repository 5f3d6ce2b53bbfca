"""The page on writing an algorithm of one's own, as it is written: its file and its command, on the real stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import SOON, Cli

from tests.pages import blocks, commands

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

PAGE = "your_own_algorithm.md"


def test_the_documented_file_trains_with_the_documented_command(
    cli: Cli, tiny: Path, sums: Path, tmp_path: Path
) -> None:
    mine, run_folder = tmp_path / "mine.py", tmp_path / "run"
    mine.write_text(blocks(PAGE, "python")[0])
    ((program, *words),) = commands(PAGE)
    assert program == "rlcli"
    words[words.index("--model") + 1] = str(tiny)
    words[words.index("--data") + 1] = str(sums)
    words[words.index("algorithm.code=mine.py")] = f"algorithm.code={mine}"
    small = [
        *SOON,
        "--set",
        "verifier.name=test-even",
        "--workers",
        "2",
        "--steps",
        "2",
        "--plan",
        "--out",
        str(run_folder),
    ]
    done = cli(*words, *small)
    assert "anchored (pull 0.1)" in done.stderr + done.stdout

    steps = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all("nonfinite" not in step for step in steps)
    # Both workers, processes of their own, have run the file; the loss has a gradient whatever the advantage.
    assert all(step["update/count"] == 1 and step["plan/skipped_samples"] == 0 for step in steps)
    assert sum(step["update/grad_norm"] for step in steps) > 0
    assert all(step["log_prob_check/max_abs_diff"] < 1e-3 for step in steps)
    assert f'code = "{mine}"' in (run_folder / "config.toml").read_text()
