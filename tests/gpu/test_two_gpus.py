"""Tests that need two GPUs: dedicated engines next to training ranks, and an engine shared by both."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from test_gpu_train import AGREEMENT, sums, tiny, train

__all__ = ["sums", "tiny"]


def gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout
    return sum(line.startswith("GPU") for line in listing.splitlines())


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(gpus() < 2, reason="fewer than two NVIDIA GPUs"),
]
COMPLETE = ("--set", "async.engine_steps=0")
"""An update waits for all responses, so that their age is known."""
APART = ("--workers", "1", "--set", "rollout.workers=1", "--set", "async.staleness=1", *COMPLETE)


@pytest.mark.parametrize("overrides", [(), ("--set", "lora.rank=8")], ids=["all weights", "adapter"])
def test_weights_reach_an_engine_on_another_gpu_while_it_generates_ahead(
    tiny: Path, sums: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    steps = train(tiny, sums, tmp_path / "run", *APART, *overrides)
    assert [line["rollout/staleness"] for line in steps] == [0.0, 1.0, 1.0]
    for line in steps:
        assert line["log_prob_check/mean_abs_diff"] < AGREEMENT
        assert line["update/grad_norm"] > 0


def test_two_gpus_share_one_engine(tiny: Path, sums: Path, tmp_path: Path) -> None:
    steps = train(tiny, sums, tmp_path / "run", "--workers", "2", "--set", "rollout.tensor_parallel=2")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["log_prob_check/mean_abs_diff"] < AGREEMENT for line in steps)
