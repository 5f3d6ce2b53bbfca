"""A disk that is full, a folder that cannot be written, a checkpoint that is damaged: said in one line, and the run
goes on once that is mended, to the same end."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT, RLCLI
from test_resume import assert_equal

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
BWRAP = ["bwrap", "--dev-bind", "/", "/", "--die-with-parent"]
DISK_BYTES = 32 << 20
"""Room for three checkpoints of the tiny model, and a little more."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lost")


@pytest.fixture(scope="module")
def outcomes(tiny: Path, sums: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Scenario → what losing.py reports of it. Afterwards `folder` contains the runs `whole` and `run`."""
    if shutil.which("bwrap") is None and os.environ.get("RLCLI_REQUIRE_BWRAP") != "1":
        pytest.skip("bubblewrap, which lends a small disk, is not installed")
    disk = folder / "disk"
    disk.mkdir()
    program = Path(__file__).with_name("losing.py")
    lent = [*BWRAP, "--size", str(DISK_BYTES), "--tmpfs", str(disk)]
    done = subprocess.run(
        [*lent, sys.executable, program, tiny, sums, folder / "whole", disk, folder / "run"],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(("whole", "full at a checkpoint", "full to the last byte", "damaged"), lines, strict=True))


def test_a_checkpoint_that_finds_the_disk_full_costs_the_run_only_itself(outcomes: dict[str, dict[str, Any]]) -> None:
    full = outcomes["full at a checkpoint"]
    third = [note for note in full["noted"] if "the checkpoint of step 3 could not be written" in note]
    assert len(third) == 1, full
    assert "No space left on device; the previous one, step-000002, is kept" in third[0]
    assert full["error"].startswith("RunFailed: the last checkpoint, of step 4, could not be written"), full
    assert "step-000002, is kept" in full["error"]
    assert "\n" not in full["error"]
    assert full["newest"] == 2
    assert full["left"] == ["latest", "step-000001", "step-000002"]


def test_a_disk_that_is_full_to_the_last_byte_stops_the_run_in_one_line(outcomes: dict[str, dict[str, Any]]) -> None:
    full = outcomes["full to the last byte"]
    # A last line of metrics may still find room in a block that is there.
    pattern = (
        r"RunFailed: (\S*/metrics\.jsonl cannot be written|cannot write \S*/samples/\S+\.parquet): No space left on "
    )
    assert re.match(pattern, full["error"]), full
    assert "\n" not in full["error"]
    assert full["newest"] == 2


def test_a_damaged_checkpoint_is_skipped_and_the_run_ends_the_same(
    outcomes: dict[str, dict[str, Any]], folder: Path
) -> None:
    damaged = outcomes["damaged"]
    notes = [note for note in damaged["noted"] if "damaged" in note]
    assert len(notes) == 1, damaged
    assert notes[0].startswith("step-000002 is damaged: policy/")
    assert notes[0].endswith("differs from what was written; going back to step-000001")
    assert damaged["error"] == ""
    assert damaged["newest"] == 4
    assert_equal(folder / "whole", folder / "run")


def test_a_run_folder_that_cannot_be_written_is_refused_in_one_line(
    outcomes: dict[str, dict[str, Any]], folder: Path
) -> None:
    run = folder / "whole"
    read_only = [*BWRAP, "--ro-bind", run, run]
    done = subprocess.run(
        [*read_only, *RLCLI, "train", "--resume", run, "--steps", "5"],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr
    assert f"run folder {run} cannot be written: Read-only file system" in errors[0]
