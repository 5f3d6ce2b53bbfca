"""Programs that the GPU tests start, and training runs of small steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# tests/integration/plugin brings a verifier whose reward random text can earn, so that there is a gradient.
PLUGIN = Path(__file__).parents[1] / "integration" / "plugin"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")])}
SMALL = [
    *("--set", "rollout.prompts_per_step=8", "--set", "rollout.samples_per_prompt=8"),
    *("--set", "rollout.max_response_tokens=64", "--set", "data.max_prompt_tokens=32"),
    *("--set", "train.tokens_per_microbatch=2048", "--set", "train.lr=1e-3", "--set", "verifier.name=test-even"),
]


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; fail with its output unless it exits with 0."""
    completed = subprocess.run(
        [sys.executable, *map(str, words)], env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=900
    )
    assert completed.returncode == 0, f"{completed.stdout[-2000:]}\n{completed.stderr[-6000:]}"
    return completed


def train(model: Path, data: Path, run_folder: Path, *words: str, recipe: str = "grpo") -> list[dict[str, Any]]:
    """The metrics of each of three steps."""
    command = ["train", recipe, "--model", model, "--data", data, "--out", run_folder, "--steps", "3"]
    run("-m", "rlcli.cli.main", *command, *SMALL, *words)
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
