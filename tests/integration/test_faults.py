"""Silent faults, planted in real runs on two workers: each is found by its check, within three steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ENVIRONMENT

SCRIPT = Path(__file__).parents[2] / "scripts" / "_faults"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_dozen_faults_are_found_and_a_sound_run_raises_nothing(tmp_path: Path) -> None:
    table = tmp_path / "faults.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--ci", "--json", str(table)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    rows = json.loads(table.read_text())
    assert sum(bool(row["check"]) for row in rows) >= 13
    assert [row["check"] for row in rows if row["name"].startswith("unharmed")] == [""]
