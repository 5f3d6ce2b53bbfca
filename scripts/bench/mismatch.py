"""How far engine and trainer disagree in bfloat16, with a head in float32 or replayed routes, and in float16.

    .venv/bin/python scripts/bench/mismatch.py [--steps 6] [--experts 16] [--layers 8] [--json mismatch.json]

A mixture of experts with random weights (`--experts 0`: a dense model), which vLLM and the trainer compute with
kernels of their own, trains a few steps each way on the same prompts and seed. Figures are means over the steps,
of each step's first update: the estimate of the KL divergence that is never negative, its largest value, the share of
tokens whose ratio lies outside [0.5, 2], and the effective sample size. With replayed routes, too: how often the
trainer's routers would have chosen another expert.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _common import write_json

FIGURES = ("mismatch/k3", "mismatch/ess", "mismatch/outliers", "update/routes_differ")
SETS = (
    *("rollout.prompts_per_step=16", "rollout.samples_per_prompt=4", "rollout.max_response_tokens=48"),
    *("data.max_prompt_tokens=32", "train.tokens_per_microbatch=2048", "train.warmup_steps=0", "train.lr=1e-4"),
    *("rollout.kv_cache_mb=256", "evaluation.data=", "model.dtype=bfloat16", "checkpoint.every=0"),
)


VERIFIER = """
from rlcli.types import Outcome, Verdict

def even(request):
    score = float(sum(request.completion_ids) % 2 == 0)
    return Verdict(score, Outcome.OK if score else Outcome.WRONG)
"""
"""Random text earns it half of the time, so that every group has a gradient."""
WAYS = {
    "as they are": (),
    "head in float32": ("model.head_dtype=float32",),
    "engine's routes": ("rollout.replay_routes=true",),
    "both": ("model.head_dtype=float32", "rollout.replay_routes=true"),
    "in float16": ("model.dtype=float16",),
    "in float16, engine's routes": ("model.dtype=float16", "rollout.replay_routes=true"),
}


def trained(model: Path, data: Path, out: Path, steps: int, own: Sequence[str]) -> list[dict[str, Any]]:
    """The steps' metrics."""
    verifier = data.parent / "even.py"
    verifier.write_text(VERIFIER)
    sets = [word for text in (*SETS, f"verifier.name={verifier}:even", *own) for word in ("--set", text)]
    words = ("train", "grpo", "--model", model, "--data", data, "--out", out, "--steps", str(steps), "--workers", "1")
    subprocess.run([sys.executable, "-P", "-m", "rlcli.cli.main", *words, *sets], check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from rlcli.data.prompts.parquet_schema import write_prompts
    from rlcli.model.io.tiny_model import make_tiny_model
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.types import ConvertOptions

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_model(folder / "model", hidden=128, layers=options.layers, experts=options.experts)
        splits = prepare(converter_named("arithmetic"), ConvertOptions(count=256, test_count=8)).splits
        for split, prompts in splits.items():
            write_prompts(folder / "data" / f"{split}.parquet", prompts)
        print(f"{'':<16}{'k3':>12}{'largest k3':>12}{'outliers':>10}{'ess':>10}{'differ':>10}")
        for number, (way, own) in enumerate(WAYS.items()):
            if "rollout.replay_routes=true" in own and not options.experts:
                continue
            steps = trained(model, folder / "data", folder / f"run-{number}", options.steps, own)
            found[way] = {one: statistics.fmean(step.get(one, 0.0) for step in steps) for one in FIGURES}
            found[way]["largest k3"] = max(step["mismatch/k3"] for step in steps)
            k3, ess, outliers, differ = (found[way][one] for one in FIGURES)
            row = f"{k3:>12.2e}{found[way]['largest k3']:>12.2e}{outliers:>10.4f}{ess:>10.5f}{differ:>10.4f}"
            print(f"{way:<16}{row}", flush=True)
    if options.json:
        write_json(options.json, {"steps": options.steps, "experts": options.experts, "ways": found})


if __name__ == "__main__":
    main()
