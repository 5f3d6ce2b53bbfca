"""`rollout.sync = delta_ahead` in real runs: the engine has all bits, a copy that is wrong
is sent again before anything is drawn by it, and an engine that dies receiving ends the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SETS = "model.dtype=bfloat16 train.lr=1e-6 rollout.workers=1 async.staleness=1 rollout.sync=delta_ahead"


@pytest.fixture(scope="module")
def runs(tiny: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By what went wrong in it, each run; the last harm ends the workers."""
    root = tmp_path_factory.mktemp("copies") / "runs"
    names = ("grpo", "grpo:bit", "grpo:cut off")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("catalog.py")), tiny, sums, root, "1", *names],
        env=os.environ | ENVIRONMENT | {"CATALOG_SETS": SETS},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["recipe"].partition(":")[2]: row for row in rows}


def test_little_is_sent_and_the_engine_has_every_bit(runs: dict[str, Any]) -> None:
    assert not runs[""]["failed"]
    assert len(runs[""]["steps"]) == 2
    for step in runs[""]["steps"]:
        assert step["sync/checked_tensors"] > 25
        assert step["sync/unchecked_tensors"] == 0
        assert step["sync/changed_tensors"] > 0
        assert 0 < step["sync/changed_share"] < 0.2


def test_a_wrong_copy_is_sent_again_and_the_run_goes_on(runs: dict[str, Any]) -> None:
    assert not runs["bit"]["failed"]
    first, second = (step["sync/bytes"] for step in runs["bit"]["steps"])
    assert first > 4 * second, "everything was sent again once"
    assert all(step["sync/unchecked_tensors"] == 0 for step in runs["bit"]["steps"])


def test_an_engine_that_dies_receiving_ends_the_run(runs: dict[str, Any]) -> None:
    failed = runs["cut off"]["failed"]  # either end of the transfer may fail first
    assert "worker 0 died in " in failed or "worker 0 failed in broadcast_weights" in failed
