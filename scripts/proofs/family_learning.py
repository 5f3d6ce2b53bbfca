"""Do tiny models of other families learn the quickstart's task, as its own Qwen2 does?

    .venv/bin/python scripts/proofs/family_learning.py [qwen3_5 qwen3_5_moe gpt_oss] [--steps 60]
        [--json FILE] [--image FILE]

For each kind: `rlcli prep arithmetic` and `rlcli tiny-model --kind KIND --warm`, then `rlcli train quickstart` on two
workers, in a scratch folder (or --folder, where a model that is there already is used again). Prints greedy pass@1 on
held-out sums before and after, with 95% intervals, the sampled reward and seconds. Exit code 1 unless pass@1 ends at
more than `ENOUGH` and above where it began. Seconds mean little where others use the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

KINDS = ("qwen3_5", "qwen3_5_moe", "gpt_oss")
ENOUGH = 0.9
"""Greedy pass@1 at the end."""
LAST_STEPS = 3
WINDOW = 5
"""Steps of which a curve shows the mean."""
TOKENS = 56
"""Response tokens: in harmony's format a few more than in the recipe's."""


def rlcli(*words: object) -> Any:
    """Parsed JSON output of a command, or None."""
    command = [sys.executable, "-P", "-m", "rlcli.cli.main", *map(str, words)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return json.loads(printed) if "--json" in words else None


def learned(kind: str, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """The figures of one kind."""
    data, model, run = folder / "sums", folder / kind, folder / f"run-{kind}"
    if not data.exists():
        rlcli("prep", "arithmetic", "--out", data)
    began = time.perf_counter()
    if not (model / "config.json").exists():
        rlcli("tiny-model", "--out", model, "--kind", kind, "--warm", data, "--seed", seed)
    warmed = time.perf_counter() - began
    began = time.perf_counter()
    paths = ("--model", model, "--data", data, "--eval-data", data, "--out", run)
    sizes = ("--steps", steps, "--set", f"evaluation.every={steps}", "--set", f"rollout.max_response_tokens={TOKENS}")
    result = rlcli("train", "quickstart", *paths, *sizes, "--workers", 2, "--set", f"train.seed={seed}", "--json")
    first, *_, last = (result["evaluations"][step]["pass"]["pass@1"] for step in sorted(result["evaluations"], key=int))
    return {
        "kind": kind,
        "seed": seed,
        "steps": steps,
        "before": first,
        "after": last,
        "rewards": result["rewards"],
        "warm_start_s": warmed,
        "seconds": time.perf_counter() - began,
        "passed": last["mean"] > max(ENOUGH, first["mean"]),
    }


def percent(estimate: dict[str, float]) -> str:
    return f"{100 * estimate['mean']:.1f}% [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def row(figures: dict[str, Any]) -> str:
    rewards = figures["rewards"]
    times = f"{figures['warm_start_s']:.0f} s | {figures['seconds']:.0f} s"
    reward = f"{rewards[0]:.2f} → {fmean(rewards[-LAST_STEPS:]):.2f}"
    initial, trained = percent(figures["before"]), percent(figures["after"])
    return f"| `{figures['kind']}` | {figures['steps']} | {initial} | {trained} | {reward} | {times} |"


def draw(results: Sequence[dict[str, Any]], file: Path) -> None:
    """The reward of each kind over its steps: of single steps, and the mean of WINDOW of them."""
    from matplotlib.figure import Figure

    from rlcli.runs.tracking.plots import running_mean

    figure = Figure(figsize=(7, 3.2), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for number, figures in enumerate(results):
        steps, rewards = range(1, len(figures["rewards"]) + 1), figures["rewards"]
        axes.plot(steps, rewards, color=f"C{number}", alpha=0.25, linewidth=1)
        label = f"{figures['kind']}: pass@1 {figures['before']['mean']:.0%} → {figures['after']['mean']:.0%}"
        axes.plot(steps, running_mean(rewards, WINDOW), color=f"C{number}", label=label)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--image", type=Path, default=None)
    arguments = parser.parse_args()
    print(f"| kind | steps | before | after | sampled reward, first → last {LAST_STEPS} | warm start | run |")
    print("|---|---|---|---|---|---|---|", flush=True)
    results = []
    with tempfile.TemporaryDirectory(prefix="rlcli-families-") as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(exist_ok=True)
        for kind in arguments.kinds:
            results.append(learned(kind, folder, arguments.steps, arguments.seed))
            print(row(results[-1]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    if arguments.image:
        draw(results, arguments.image)
    return 0 if all(figures["passed"] for figures in results) else 1


if __name__ == "__main__":
    sys.exit(main())
