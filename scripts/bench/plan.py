"""How close `rlcli plan` comes: short real trainings on this machine's CPUs, predicted and measured phase by phase.

    .venv/bin/python scripts/bench/plan.py [--cases 10m-full,10m-lora] [--limit-s 180] [--json plan.json]

Each case is a run of a few steps with random weights, random rewards (or nothing would be learned from) and responses
that go on to the end, on one thread a worker. Predicted is what `rlcli plan` says before; measured is the largest
`memory/PHASE_gb` over the run's steps. A row is a phase; the error is (predicted − measured) ÷ measured.

Each run has processes of its own, and as long as --limit-s says; one that takes longer is ended, and reported as such.
With --json its figures are in the file as soon as it is done: cases that are already there stay, or are replaced by
themselves, so that what was interrupted goes on with the cases that are missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _common import write_json
from rich.console import Console
from rich.table import Table

from rlcli.errors import SetupError
from rlcli.launch.planning.calibrate import measured, trained

SIZES = {
    "1m": {"hidden": 128, "layers": 4, "heads": 4, "kv-heads": 2},
    "4m": {"hidden": 256, "layers": 3, "heads": 4, "kv-heads": 1},
    "10m": {"hidden": 384, "layers": 4, "heads": 6, "kv-heads": 2},
    "20m": {"hidden": 512, "layers": 6, "heads": 8, "kv-heads": 8},
    "25m": {"hidden": 576, "layers": 6, "heads": 9, "kv-heads": 3},
    "30m": {"hidden": 640, "layers": 5, "heads": 10, "kv-heads": 2},
    "60m": {"hidden": 768, "layers": 8, "heads": 12, "kv-heads": 4},
    "80m": {"hidden": 896, "layers": 7, "heads": 14, "kv-heads": 2},
    "100m": {"hidden": 1024, "layers": 6, "heads": 16, "kv-heads": 4},
}
FEW = ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", "checkpoint.every=0"]
CASES: dict[str, tuple[str, str, list[str]]] = {
    "1m-full": ("1m", "grpo", []),
    "1m-two-workers": ("1m", "grpo", ["cluster.workers=2"]),
    "4m-full": ("4m", "grpo", ["rollout.max_response_tokens=200", "train.tokens_per_microbatch=1760"]),
    "10m-full": ("10m", "grpo", []),
    "10m-small": ("10m", "grpo", ["train.tokens_per_microbatch=880"]),
    "10m-checkpointing": ("10m", "grpo", ["model.gradient_checkpointing=true"]),
    "10m-lora": ("10m", "grpo", ["lora.rank=16", "train.lr=1e-4"]),
    "10m-reference": ("10m", "grpo", ["algorithm.kl_coef=0.01"]),
    "10m-critic": ("10m", "ppo", ["algorithm.kl_coef=0"]),
    "10m-two-workers": ("10m", "grpo", ["cluster.workers=2"]),
    "20m-full": ("20m", "grpo", ["train.tokens_per_microbatch=1760"]),
    "20m-lora": ("20m", "grpo", ["lora.rank=32", "train.lr=1e-4"]),
    "20m-reference": ("20m", "grpo", ["algorithm.kl_coef=0.01", "cluster.workers=2"]),
    "25m-full": ("25m", "grpo", ["train.tokens_per_microbatch=1760"]),
    "25m-lora": ("25m", "grpo", ["lora.rank=8", "train.lr=1e-4"]),
    "25m-lora-two": ("25m", "grpo", ["lora.rank=32", "train.lr=1e-4", "cluster.workers=2"]),
    "30m-full": ("30m", "grpo", []),
    "30m-lora": ("30m", "grpo", ["lora.rank=8", "train.lr=1e-4"]),
    "30m-critic": ("30m", "ppo", ["algorithm.kl_coef=0", "model.gradient_checkpointing=true"]),
    "30m-two-workers": ("30m", "grpo", ["cluster.workers=2"]),
    "60m-full": ("60m", "grpo", ["train.tokens_per_microbatch=880"]),
    "60m-checkpointing": ("60m", "grpo", ["model.gradient_checkpointing=true", "rollout.prompts_per_step=2"]),
    "80m-lora": ("80m", "grpo", ["lora.rank=16", "train.lr=1e-4", "train.tokens_per_microbatch=1760"]),
    "100m-full": ("100m", "grpo", [*FEW]),
    "100m-two-workers": ("100m", "grpo", [*FEW, "cluster.workers=2"]),
    "100m-lora": ("100m", "grpo", [*FEW, "lora.rank=16", "train.lr=1e-4"]),
    "100m-checkpointing": ("100m", "grpo", [*FEW, "model.gradient_checkpointing=true"]),
}
GIB = 1 << 30


def run_case(name: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """Predict and run one case. Its record has `failed`, in words, in place of figures where the run did not end well
    within `limit_s` seconds."""
    size, recipe, own = CASES[name]
    started = time.monotonic()
    try:
        found, steps = trained(folder, name, SIZES[size], recipe, [*own, "cluster.device=cpu"], limit_s)
    except SetupError as error:
        return {"case": name, "failed": error.message}
    predicted, real = {phase.name: phase for phase in found.memory}, measured(steps)
    rows = {
        phase: {"predicted": of.total / GIB, "measured": real[f"memory/{phase}"] / GIB, "parts": of.parts}
        for phase, of in predicted.items()
        if f"memory/{phase}" in real
    }
    base = {"predicted": predicted["update"].parts["base"] / GIB, "measured": real["memory/base"] / GIB}
    return {"case": name, "seconds": time.monotonic() - started, "base": base, "phases": rows, "steps": steps}


def show(records: list[dict[str, Any]]) -> None:
    table = Table(title="memory of a worker, GiB")
    for column in ("case", "phase", "predicted", "measured", "error"):
        table.add_column(column, justify="left" if column in ("case", "phase") else "right")
    for record in records:
        for phase, row in record.get("phases", {}).items():
            error = row["predicted"] / row["measured"] - 1
            highest = phase == _highest(record)
            table.add_row(
                record["case"],
                phase,
                *(f"{row['predicted']:.3f}", f"{row['measured']:.3f}", f"{error:+.1%}"),
                style="bold" if highest else "",
            )
        if "failed" in record:
            table.add_row(record["case"], "no figures", "", "", "")
        table.add_section()
    Console().print(table)
    for record in records:
        if "failed" in record:
            Console().print(f"{record['case']}: {record['failed']}")


def _highest(record: Mapping[str, Any]) -> str:
    phases: dict[str, dict[str, float]] = record["phases"]
    return max(phases, key=lambda phase: phases[phase]["measured"])


def summary(records: list[dict[str, Any]]) -> dict[str, float]:
    """The largest error of all phases, and that of the highest phase of each case; none where there are no figures."""
    rows = [(record, record["phases"]) for record in records if "phases" in record]
    errors = [abs(row["predicted"] / row["measured"] - 1) for _, phases in rows for row in phases.values()]
    peaks = [phases[_highest(record)] for record, phases in rows]
    if not rows:
        return {}
    return {
        "largest_error": max(errors),
        "mean_error": sum(errors) / len(errors),
        "largest_error_of_peaks": max(abs(row["predicted"] / row["measured"] - 1) for row in peaks),
    }


def earlier(path: str) -> list[dict[str, Any]]:
    """The cases that are in the file already."""
    if not path or not Path(path).is_file():
        return []
    found: list[dict[str, Any]] = json.loads(Path(path).read_text())["cases"]
    return found


def cases(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise argparse.ArgumentTypeError(f"no case '{unknown[0]}': give some of {', '.join(CASES)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=cases, default=list(CASES), metavar="NAME,…", help=", ".join(CASES))
    parser.add_argument("--limit-s", type=float, default=180.0, help="seconds that a run may take")
    parser.add_argument("--json", default="", help="write the figures here, case by case")
    options = parser.parse_args()
    records = earlier(options.json)
    with tempfile.TemporaryDirectory(prefix="rlcli-plan-") as folder:
        for name in options.cases:
            print(f"{name} …", file=sys.stderr, flush=True)
            record = run_case(name, Path(folder), options.limit_s)
            done = record.get("failed") or f"{record['seconds']:.0f} s"
            print(f"{name}: {done}", file=sys.stderr, flush=True)
            records = [other for other in records if other["case"] != name] + [record]
            write_json(options.json, {"cases": records, **summary(records)})
    show(records)
    Console().print(", ".join(f"{what.replace('_', ' ')} {error:.1%}" for what, error in summary(records).items()))
    return 1 if any("failed" in record for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
