"""How close `rlcli plan` comes: short real trainings on this machine's CPUs, predicted and measured phase by phase.

    .venv/bin/python scripts/bench/plan.py [--cases 10m-full 10m-lora …] [--json plan.json]

Each case is a run of a few steps with random weights, random rewards (or nothing would be learned from) and responses
that go on to the end, on one thread a worker. Predicted is what `rlcli plan` says before; measured is the largest
`memory/PHASE_gb` over the run's steps. A row is a phase; the error is (predicted − measured) ÷ measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import write_json
from rich.console import Console
from rich.table import Table

from rlcli.trainer.planning import planned

SIZES = {
    "10m": {"hidden": 384, "layers": 4, "heads": 6, "kv-heads": 2},
    "100m": {"hidden": 1024, "layers": 6, "heads": 16, "kv-heads": 4},
}
COMMON = [
    *("data.max_prompt_tokens=24", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=8"),
    *("rollout.max_response_tokens=104", "train.tokens_per_microbatch=4096", "train.lr=1e-5", "checkpoint.every=1"),
    *("checkpoint.keep=1", "train.steps=3", "cluster.device=cpu"),
]
FEW = ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", "train.steps=2", "checkpoint.every=0"]
CASES: dict[str, tuple[str, str, list[str]]] = {
    "10m-full": ("10m", "grpo", []),
    "10m-small": ("10m", "grpo", ["train.tokens_per_microbatch=1024"]),
    "10m-checkpointing": ("10m", "grpo", ["model.gradient_checkpointing=true"]),
    "10m-lora": ("10m", "grpo", ["lora.rank=16", "train.lr=1e-4"]),
    "10m-reference": ("10m", "grpo", ["algorithm.kl_coef=0.01"]),
    "10m-critic": ("10m", "ppo", ["algorithm.kl_coef=0"]),
    "10m-two-workers": ("10m", "grpo", ["cluster.workers=2"]),
    "100m-full": ("100m", "grpo", [*FEW]),
    "100m-lora": ("100m", "grpo", [*FEW, "lora.rank=16", "train.lr=1e-4"]),
    "100m-checkpointing": ("100m", "grpo", [*FEW, "model.gradient_checkpointing=true"]),
}
REWARD = """
import hashlib

from rlcli.types import Outcome, Verdict


def verify(request):
    score = hashlib.sha256(request.completion.encode()).digest()[0] % 2
    return Verdict(score=float(score), outcome=Outcome.OK if score else Outcome.WRONG, answer="")


def gold(request):
    return "x"
"""


def measured(folder: Path) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Phase → the largest GiB over all steps; and the same of each step."""
    steps = [
        {
            name.removeprefix("memory/").removesuffix("_gb"): value
            for name, value in json.loads(line).items()
            if name.startswith("memory/")
        }
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    return {phase: max(step.get(phase, 0.0) for step in steps) for step in steps for phase in step}, steps


def run_case(name: str, folder: Path, timeout_s: float) -> dict[str, Any]:
    size, recipe, own = CASES[name]
    model = folder / size
    if not model.exists():
        sizes = [word for key, value in SIZES[size].items() for word in (f"--{key}", str(value))]
        rlcli("tiny-model", "--out", str(model), *sizes)
    data, verifier = folder / "data", folder / "reward.py"
    if not data.exists():
        rlcli("prep", "arithmetic", "--out", str(data))
        verifier.write_text(REWARD)
    sets = [*COMMON, *own, f"verifier.name={verifier}:verify"]
    flags = {"model.path": str(model), "data.path": str(data)}
    found, _ = planned(recipe, flags, sets, "", lambda note: None)
    predicted = {phase.name: phase for phase in found.memory}
    out = folder / name
    words = [word for text in sets for word in ("--set", text)]
    rlcli(
        *("train", recipe, "--model", str(model), "--data", str(data), "--out", str(out), *words), timeout_s=timeout_s
    )
    real, steps = measured(out)
    rows = {
        phase: {"predicted": predicted[phase].total / 2**30, "measured": real[phase], "parts": predicted[phase].parts}
        for phase in predicted
        if phase in real
    }
    base = {"predicted": predicted["update"].parts["base"] / 2**30, "measured": real["base"]}
    return {"case": name, "base": base, "phases": rows, "steps": steps}


def rlcli(*words: str, timeout_s: float = 120.0) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "rlcli.cli.main", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        sys.exit(f"rlcli {words[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def show(records: list[dict[str, Any]]) -> None:
    table = Table(title="memory of a worker, GiB")
    for column in ("case", "phase", "predicted", "measured", "error"):
        table.add_column(column, justify="left" if column in ("case", "phase") else "right")
    for record in records:
        for phase, row in record["phases"].items():
            error = row["predicted"] / row["measured"] - 1
            table.add_row(record["case"], phase, f"{row['predicted']:.3f}", f"{row['measured']:.3f}", f"{error:+.1%}")
        table.add_section()
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a run may take")
    parser.add_argument("--json", default="", help="write the figures here")
    options = parser.parse_args()
    records = []
    with tempfile.TemporaryDirectory(prefix="rlcli-plan-") as folder:
        for name in options.cases:
            records.append(run_case(name, Path(folder), options.timeout))
    show(records)
    errors = [abs(row["predicted"] / row["measured"] - 1) for r in records for row in r["phases"].values()]
    Console().print(f"largest error {max(errors):.1%}, mean {sum(errors) / len(errors):.1%}")
    write_json(options.json, {"cases": records, "largest_error": max(errors)})


if __name__ == "__main__":
    main()
