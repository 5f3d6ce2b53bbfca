"""Predictions of memory against what a run measures on one NVIDIA GPU. (Not tried yet: no GPU was at hand.)"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_runs import ENVIRONMENT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA GPU"),
]

SETS = [
    *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=8", "rollout.max_response_tokens=480"),
    *("data.max_prompt_tokens=32", "train.tokens_per_microbatch=16384", "train.steps=3", "checkpoint.every=0"),
    *("verifier.name=test-even", "rollout.gpu_memory_utilization=0.4"),
]
CLOSE = 0.10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200M parameters, and a vocabulary whose end token is rarely sampled: responses reach their limit."""
    from rlcli.model.io.tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("model") / "model"
    return make_tiny_model(folder, hidden=1024, layers=12, heads=16, kv_heads=4)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlcli.data.prompts.parquet_schema import write_prompts
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.types import ConvertOptions

    folder = tmp_path_factory.mktemp("data")
    for split, prompts in prepare(converter_named("arithmetic"), ConvertOptions(count=64, test_count=8)).splits.items():
        write_prompts(folder / f"{split}.parquet", prompts)
    return folder


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.gradient_checkpointing=true"],
        ["lora.rank=16", "train.lr=1e-4"],
        ["algorithm.kl_coef=0.01", "train.offload=optimizer"],
    ],
    ids=["whole", "checkpointing", "lora", "reference-and-offload"],
)
def test_a_run_takes_what_was_predicted(overrides: list[str], model: Path, sums: Path, tmp_path: Path) -> None:
    words = ["grpo", "--model", str(model), "--data", str(sums)]
    words += [word for text in [*SETS, *overrides] for word in ("--set", text)]
    printed = rlcli("plan", *words, "--json")
    predicted = {name: phase_memory["total"] for name, phase_memory in json.loads(printed)["memory"].items()}
    rlcli("train", *words, "--out", str(tmp_path / "run"))
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = {name: max(step.get(f"memory/{name}", 0.0) for step in steps) for name in predicted}
    for phase in ("generate_gb", "update_gb", "sync_gb"):
        assert predicted[phase] == pytest.approx(measured[phase], rel=CLOSE), (phase, predicted, measured)


def rlcli(*words: str) -> str:
    command = [sys.executable, "-m", "rlcli.cli.main", *words]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout
