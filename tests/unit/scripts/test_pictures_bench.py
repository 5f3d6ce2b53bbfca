"""The benchmark of pictures, on a few small ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench" / "pictures.py"


@pytest.mark.long
def test_the_benchmark_of_pictures_measures_every_stage(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--pictures", "12", "--side", "96", "--format", "JPEG", "--json", tmp_path / "j"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "j").read_text())
    assert found["decoded"] == 12 * 96 * 96 * 3
    assert 0 < found["encoded"] < found["decoded"]
    assert list(found["stages"]) == ["prep", "read and check", "tokenize", "a step's pictures"]
    assert all(stage.keys() == {"seconds", "anonymous", "resident"} for stage in found["stages"].values())
    for name in found["stages"]:
        assert name in done.stderr
