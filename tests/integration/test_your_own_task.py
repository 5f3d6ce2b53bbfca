"""The page on a task of one's own as it is written, top to bottom: the reward rises, and the export answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ENVIRONMENT

from rlcli.runs.record_files import evaluations_of, metrics_of
from tests.page_blocks import FILES, write_files
from tests.pages import DOCS, blocks

pytestmark = pytest.mark.timeout(600)

PAGE = "your_own_task.md"
RLCLI = Path(sys.executable).with_name("rlcli")


@pytest.mark.exhaustive  # each of its commands has tests of its own
def test_the_page_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{RLCLI.parent}{os.pathsep}{os.environ['PATH']}")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    write_files(DOCS / PAGE, tmp_path)
    assert all((tmp_path / name).is_file() for name in FILES[f"docs/{PAGE}"])
    printed = []
    for block in blocks(PAGE, "bash"):
        done = subprocess.run(["bash", "-e"], input=block, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        printed.append(done.stdout)
    assert re.search(r"pass@1 +0\.0%", printed[2]), "the model of random weights never succeeds"
    rewards = [line["reward/mean"] for line in metrics_of(tmp_path / "runs" / "roman") if line["step"]]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert first > 0.02, "the warm start succeeds sometimes"
    assert last > first + 0.2
    evaluations = evaluations_of(tmp_path / "runs" / "roman")
    initial, final = (evaluations[step]["pass"]["pass@1"]["mean"] for step in (0, len(rewards)))
    assert final > initial
    assert re.fullmatch(r"[CXLVI]+", printed[-1].splitlines()[-1]), "the export answers"
    assert "next:" in printed[0]
    assert (tmp_path / "my-roman-model" / "config.json").is_file()
