"""Accuracy of `rlcli plan`: short real trainings on this machine's CPUs, predicted and measured.

    .venv/bin/python scripts/bench/plan.py [--cases 10m,10m-lora] [--model FOLDER --data FOLDER] [--json plan.json]

Each case is a run of six steps with random rewards, a different one for each response, so that every sample is trained
on. The small models have random weights, and their responses never end; those of --model (the cases 135m-…) mostly
reach the maximum. Predicted is what `rlcli plan` says before. Measured are the largest `memory/PHASE_gb` over the run's
steps and the median `time/PHASE_s` of the last three. The error is predicted ÷ measured.

Each run has processes of its own, and as long as --limit-s says; one that takes longer is ended, and reported as such.
With --json its figures are in the file as soon as it is done: cases that are already there are not run again, so that
what was interrupted goes on with the cases that are missing (--again: run them).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _common import write_json
from _plan_runs import WARM_UP, Sizes, measured, trained
from rich.console import Console
from rich.table import Table

from rlcli.errors import SetupError

SIZES: dict[str, Sizes] = {
    "0.5m": {"hidden": 128, "layers": 2, "heads": 4, "kv-heads": 2},
    "1m": {"hidden": 128, "layers": 4, "heads": 4, "kv-heads": 2},
    "4m": {"hidden": 256, "layers": 3, "heads": 4, "kv-heads": 1},
    "10m": {"hidden": 384, "layers": 4, "heads": 6, "kv-heads": 2},
    "25m": {"hidden": 576, "layers": 6, "heads": 9, "kv-heads": 3},
    "60m": {"hidden": 768, "layers": 8, "heads": 12, "kv-heads": 4},
}
MODEL = "135m"
"""The size of --model."""
HALF = ["model.dtype=bfloat16"]
LORA = ["lora.rank=16", "train.lr=1e-4"]
FEW = ["rollout.samples_per_prompt=4", "rollout.max_response_tokens=32", "data.max_prompt_tokens=96"]
SFT = ["rollout.samples_per_prompt=1", "rollout.prompts_per_step=64"]
CASES: dict[str, tuple[str, str, list[str]]] = {
    "0.5m": ("0.5m", "grpo", []),
    "1m": ("1m", "grpo", []),
    "1m-bfloat16": ("1m", "grpo", HALF),
    "1m-sft": ("1m", "sft", SFT),
    "1m-two-workers": ("1m", "grpo", ["cluster.workers=2"]),
    "4m": ("4m", "grpo", ["rollout.max_response_tokens=200", "train.tokens_per_microbatch=1760"]),
    "10m": ("10m", "grpo", []),
    "10m-bfloat16": ("10m", "grpo", HALF),
    "10m-small": ("10m", "grpo", ["train.tokens_per_microbatch=880"]),
    "10m-checkpointing": ("10m", "grpo", ["model.gradient_checkpointing=true"]),
    "10m-lora": ("10m", "grpo", LORA),
    "10m-lora-bfloat16": ("10m", "grpo", [*LORA, *HALF]),
    "10m-sft": ("10m", "sft", SFT),
    "10m-reference": ("10m", "grpo", ["algorithm.kl_coef=0.01"]),
    "10m-critic": ("10m", "ppo", ["algorithm.kl_coef=0"]),
    "10m-two-workers": ("10m", "grpo", ["cluster.workers=2"]),
    "25m": ("25m", "grpo", ["train.tokens_per_microbatch=1760"]),
    "60m": ("60m", "grpo", ["train.tokens_per_microbatch=880"]),
    "135m-float32": (MODEL, "grpo", [*FEW, "model.dtype=float32"]),
    "135m-bfloat16": (MODEL, "grpo", [*FEW, *HALF]),
    "135m-lora": (MODEL, "grpo", [*FEW, *LORA, "model.dtype=float32"]),
    "135m-lora-bfloat16": (MODEL, "grpo", [*FEW, *LORA, *HALF]),
    "135m-sft": (MODEL, "sft", [*SFT, *HALF, "rollout.prompts_per_step=32", "data.max_prompt_tokens=96"]),
}
METHODS = {"generate": "rollout", "update": "update", "sync": "sync_weights"}
"""Phase → the worker's method."""
TIMED = ("generate", "update", "sync", "step")
GIB = 1 << 30


def run_case(
    name: str, folder: Path, model: Path | None, data: Path | None, limit_s: float, alone: bool
) -> dict[str, Any]:
    """Predict and run one case. alone: on one thread, and measured in CPU seconds.

    Its record has `failed`, in words, in place of figures where the run did not end well within `limit_s` seconds.
    """
    size, recipe, sets = CASES[name]
    sets = [*sets, "train.deterministic=true"] if alone else sets
    began = time.monotonic()
    benchmark_model = size == MODEL
    source: Sizes | Path = model if benchmark_model and model is not None else SIZES[size]
    rows = data if benchmark_model and recipe != "sft" else None
    try:
        plan, steps, cpu = trained(folder, name, source, recipe, [*sets, "cluster.device=cpu"], rows, limit_s)
    except SetupError as error:
        return {"case": name, "failed": error.message}
    real = measured(steps)
    memory = {
        phase.name: {"predicted": phase.total / GIB, "measured": real[f"memory/{phase.name}"] / GIB}
        for phase in plan.memory
        if f"memory/{phase.name}" in real
    }
    predicted = {phase.name: phase.seconds for phase in plan.seconds} | {"step": plan.step_seconds}
    seconds = {
        phase: {"predicted": predicted[phase], "measured": real[f"time/{phase}"]}
        for phase in TIMED
        if phase in predicted and f"time/{phase}" in real
    }
    if alone:
        measured_steps = cpu[WARM_UP:]
        for phase, row in seconds.items():
            phase_seconds = [
                sum(step.values()) if phase == "step" else step.get(METHODS[phase], 0.0) for step in measured_steps
            ]
            row["measured"] = statistics.median(phase_seconds) if phase_seconds else 0.0
    parts = {phase.name: {part: size / GIB for part, size in phase.parts.items()} for phase in plan.memory}
    spent = time.monotonic() - began
    return {
        "case": name,
        "took_s": spent,
        "memory": memory,
        "seconds": seconds,
        "parts": parts,
        "steps": steps,
        "cpu": cpu,
    }


def show(records: list[dict[str, Any]]) -> None:
    """A row for each case: its peak, and the seconds of a step and of its phases."""
    table = Table(title="predicted / measured")
    for column in ("case", "peak, GiB", "", *(f"{phase}, s" for phase in ("step", "generate", "update", "sync"))):
        table.add_column(column, justify="left" if column == "case" else "right")
    for record in records:
        if "failed" in record:
            table.add_row(record["case"], "no figures")
            continue
        peak = _peak(record)
        seconds = record["seconds"]
        table.add_row(
            record["case"],
            f"{peak['predicted']:.2f} / {peak['measured']:.2f}",
            f"{peak['predicted'] / peak['measured'] - 1:+.1%}",
            *(_both(seconds.get(phase)) for phase in ("step", "generate", "update", "sync")),
        )
    Console().print(table)
    for record in records:
        if "failed" in record:
            Console().print(f"{record['case']}: {record['failed']}")


def _both(row: Mapping[str, float] | None) -> str:
    if row is None or not row["measured"]:
        return ""
    return f"{row['predicted']:.3g} / {row['measured']:.3g} = {row['predicted'] / row['measured']:.2f}"


def _peak(record: Mapping[str, Any]) -> dict[str, float]:
    """The phase that takes most, as measured."""
    memory: dict[str, dict[str, float]] = record["memory"]
    return max(memory.values(), key=lambda row: row["measured"])


def summary(records: list[dict[str, Any]]) -> dict[str, float]:
    """The largest factor between predicted and measured seconds of a step, and the largest error of a peak; none where
    there are no figures."""
    ran = [record for record in records if "memory" in record]
    if not ran:
        return {}
    ratios = [row["predicted"] / row["measured"] for record in ran if (row := record["seconds"].get("step"))]
    errors = [abs(peak["predicted"] / peak["measured"] - 1) for peak in map(_peak, ran)]
    return {
        "largest_factor_of_a_step": max((max(ratio, 1 / ratio) for ratio in ratios if ratio), default=float("nan")),
        "largest_error_of_a_peak": max(errors),
        "mean_error_of_a_peak": sum(errors) / len(errors),
    }


def earlier(path: str) -> list[dict[str, Any]]:
    """The cases that are in the file already."""
    if not path or not Path(path).is_file():
        return []
    records: list[dict[str, Any]] = json.loads(Path(path).read_text())["cases"]
    return records


def cases(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise argparse.ArgumentTypeError(f"no case '{unknown[0]}': give some of {', '.join(CASES)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=cases, default=[], metavar="NAME,…", help=", ".join(CASES))
    parser.add_argument("--model", type=Path, help="folder of the model of the cases 135m-…; left out: none of them")
    parser.add_argument("--data", type=Path, help="its prompts (default: sums)")
    parser.add_argument("--limit-s", type=float, default=180.0, help="seconds that a run may take")
    parser.add_argument("--json", default="", help="write the figures here, case by case")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread a worker (train.deterministic), and its CPU seconds: on a machine with other work",
    )
    parser.add_argument("--again", action="store_true", help="run cases again that are in that file")
    options = parser.parse_args()
    records = earlier(options.json)
    done = set() if options.again else {record["case"] for record in records if "failed" not in record}
    names = options.cases or [name for name in CASES if CASES[name][0] != MODEL or options.model]
    if options.model is None and any(CASES[name][0] == MODEL for name in names):
        parser.error("the cases 135m-… need --model")
    with tempfile.TemporaryDirectory(prefix="rlcli-plan-") as folder:
        for name in (name for name in names if name not in done):
            print(f"{name} …", file=sys.stderr, flush=True)
            record = run_case(name, Path(folder), options.model, options.data, options.limit_s, options.cpu_time)
            done_in = record.get("failed") or f"{record['took_s']:.0f} s"
            print(f"{name}: {done_in}", file=sys.stderr, flush=True)
            records = [other for other in records if other["case"] != name] + [record]
            write_json(options.json, {"cases": records, **summary(records)})
    records.sort(key=lambda record: list(CASES).index(record["case"]) if record["case"] in CASES else len(CASES))
    show(records)
    Console().print(
        ", ".join(f"{quantity.replace('_', ' ')} {value:.3g}" for quantity, value in summary(records).items())
    )
    return 1 if any("failed" in record for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
