"""scripts/gpu-check --rehearse: every part runs on the CPU and leaves the figures that it would leave on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = Path(__file__).parents[2] / "scripts" / "gpu-check"
FIGURES = {
    "environment": ["python", "torch", "tier 1", "tier 2"],
    "trainer": ["head, chunks of 256", "MFU of an update, 512 tokens, plain", "gathering, bucket 32"],
    "transformers": ["step, s", "engine against trainer, mean"],
    "engine": ["freed by sleep", "log-probs after waking, worst difference", "gathering and loading"],
    "grpo-0.5b": ["step, s", "memory, update", "engine against trainer, mean"],
    "planner": ["whole, generate: error", "whole, update: error", "whole, sync: error"],
    "grpo-1.5b": ["step, s", "weight sync, GB/s"],
    "step": ["step ÷ floor", "floor: raw vLLM", "floor: raw torch", "our generate", "our update"],
    "mfu": ["0.5b: MFU of the update", "0.5b: MFU of the step", "0.5b: rollout"],
    "tests": ["passed", "failed", "skipped"],
}


SHORT = ["environment", "trainer", "transformers", "engine", "grpo-0.5b", "planner"]
"""Without --full."""


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "parts", [SHORT, pytest.param(list(FIGURES), marks=pytest.mark.exhaustive)], ids=["short", "full"]
)
def test_the_gpu_check_is_rehearsed(parts: list[str], tmp_path: Path) -> None:
    result_folder, back = tmp_path / "out", tmp_path / "back"
    back.mkdir()
    full = [] if parts is SHORT else ["--full"]
    done = subprocess.run(
        [COMMAND, "--rehearse", *full, "--minutes", "45", "--out", result_folder, "--models", tmp_path / "models"],
        env=os.environ | {"PYTHON": sys.executable, "OUT": str(back)},
        capture_output=True,
        text=True,
        timeout=2900,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    written: dict[str, Any] = json.loads((result_folder / "gpu-check.json").read_text())["parts"]
    assert parts == [name for name in FIGURES if written.get(name, {}).get("status") == "ok"]
    for name in parts:
        figures = {figure["name"]: figure["value"] for figure in written[name]["figures"]}
        assert set(FIGURES[name]) <= set(figures), name
        assert written[name]["checks"] or name == "mfu", name  # which has figures alone
        assert written[name]["leftovers"] == 0, name
    assert "nothing of a GPU" in (back / "gpu-check.md").read_text()
    if "step" not in parts:
        return
    step = {figure["name"]: figure["value"] for figure in written["step"]["figures"]}
    assert step["step ÷ floor"] > 0
    assert step["TRL ÷ ours"] in ("not installed", "not run in a rehearsal")
    assert len(written["step"]["data"]["floor: rounds, warm-up included"]) == 2
    assert (back / "grpo-0.5b.log").stat().st_size > 0
