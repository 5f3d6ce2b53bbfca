"""A sound run in bfloat16 passes the log-prob check: the small case of its proof."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ENVIRONMENT

SCRIPT = Path(__file__).parents[2] / "scripts" / "proofs" / "log_prob_check.py"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_sound_run_in_bfloat16_passes(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--ci", "--folder", str(tmp_path), "--json", str(table)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    (row,) = json.loads(table.read_text())
    assert (row["name"], row["steps"]) == ("bfloat16", 3)
    assert row["tokens"] > 256, "the samples themselves were compared"
    assert 0 < row["mean_abs_diff"] < row["max_abs_diff"]
    assert 0 < row["margin"] <= 1
