"""Short deterministic runs: their metrics, and the checksums of what their last checkpoints hold."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tree import Tree

RECIPES = ["grpo", "dapo", "ppo", "prime", "dpo"]
SEEDS = [0, 1]
WORKERS = [1, 2]
STEPS = 10
CLOCKED = ("time/", "throughput/", "memory/", "verify_s")
"""Metrics that differ from run to run."""
SETS = [
    *("train.minibatches=2", "train.tokens_per_microbatch=256", "train.lr=1e-3", "train.warmup_steps=0"),
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_response_tokens=24"),
    *("rollout.kv_cache_mb=64", "data.max_prompt_tokens=64", "dynamic_sampling.max_batches=4"),
    *("critic.warmup_steps=0", "shaping.overlong_buffer=8", "evaluation.data=", "checkpoint.every=0"),
    "model.gradient_checkpointing=false",
]
VERIFIER = '''"""Rewards what random text can earn, so that a random model has something to learn."""

from rlcli.types import Outcome, Verdict, VerifyRequest


def even(request: VerifyRequest) -> Verdict:
    """The response has an even number of digits."""
    right = sum(character.isdigit() for character in request.completion) % 2 == 0
    return Verdict(score=float(right), outcome=Outcome.OK if right else Outcome.WRONG, answer=request.completion[-8:])
'''
CHECKSUMS = """
import hashlib, json, sys
from pathlib import Path
import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

def tensors(value):
    if isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, torch.Tensor):
        yield value

found = []
for metadata in sorted(Path(sys.argv[1]).rglob(".metadata")):
    state = {}
    _load_state_dict(state, FileSystemReader(metadata.parent), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    for tensor in tensors(state):
        held = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        found.append(f"{list(tensor.shape)} {tensor.dtype} {hashlib.sha256(held).hexdigest()[:16]}")
print(json.dumps(sorted(found)))
"""
"""Run in the tree's environment: shape, dtype and digest of each tensor of the model and the optimizer, without their
names, which another layout may change."""


def trained(tree: Tree, work: Path) -> dict[str, Any]:
    """Metrics by step, and checksums, of each run."""
    make_model_and_data(tree, work)
    return {
        f"{recipe}, seed {seed}, workers {workers}": run(tree, work, recipe, seed, workers)
        for recipe in RECIPES
        for seed in SEEDS
        for workers in WORKERS
    }


def make_model_and_data(tree: Tree, work: Path) -> None:
    if not (work / "model").exists():
        tree.rlcli("tiny-model", "--out", work / "model")
        tree.rlcli("prep", "arithmetic", "--count", 64, "--test-count", 8, "--out", work / "data")
        (work / "even.py").write_text(VERIFIER)


def run(tree: Tree, work: Path, recipe: str, seed: int, workers: int) -> dict[str, Any]:
    run_folder = work / f"{recipe}-{seed}-{workers}"
    words = ["train", recipe, "--model", work / "model", "--data", work / "data" / "train.parquet", "--out", run_folder]
    words += ["--steps", STEPS, "--seed", seed, "--workers", workers, "--deterministic"]
    words += ["--verifier", f"{work / 'even.py'}:even"]
    tree.rlcli(*words, *(word for text in SETS for word in ("--set", text)))
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [
        {name: value for name, value in json.loads(line).items() if not name.startswith(CLOCKED)} for line in lines
    ]
    python = tree.path / ".venv" / "bin" / "python"
    checksums = subprocess.run(
        [python, "-P", "-c", CHECKSUMS, run_folder / "checkpoints" / "latest"],
        check=True,
        capture_output=True,
        text=True,
    )
    return {"metrics": steps, "checkpoint": json.loads(checksums.stdout)}
