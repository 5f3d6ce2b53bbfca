"""Runs scripts/bench/step.py: whole steps against their floor, then against TRL's steps.

The two comparisons are separate, since all contestants together do not fit on one GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from _gpu_check import models, runs
from _gpu_check.check import Check, CheckFailed

TRL_MODES = ("vllm:16", "generate:16")
"""Modes to try; the first that works is measured. 16 samples a micro-batch: TRL holds the logits of all tokens."""
TRL_TAKES_S = 170.0
TARGET = "<= 1.15"
"""Step ÷ floor; on CPUs it is 0.82 to 0.96 (docs/performance.md)."""


def run(check: Check) -> None:
    check.progress("raw vLLM, raw torch, then our run and rounds of all three", 160)
    report = bench(check, "floor", ["--fixed-micro"] if check.rehearse else [])
    ours = report["ours"]["1"]["all"]
    check.figure("step ÷ floor", ours["to_floor"], "", TARGET, note="median of the rounds' quotients")
    check.figure("our step", ours["seconds"], "s")
    check.figure("floor: raw vLLM", report["medians"]["generate 1"], "s")
    check.figure("floor: raw torch", report["medians"]["train 1"], "s")
    for phase, seconds in ours["phases"].items():
        if seconds > 5e-4:
            check.figure(f"our {phase.replace('_', ' ')}", seconds, "s")
    check.require(ours["seconds"] > 0, "a step was measured", f"{ours['seconds']:.3f} s")
    against_trl(check)


def against_trl(check: Check) -> None:
    if find_spec("trl") is None or check.rehearse:
        check.figure("TRL ÷ ours", "not run in a rehearsal" if find_spec("trl") else "not installed")
        return
    for mode in TRL_MODES:
        if check.remaining_s < TRL_TAKES_S:
            check.figure(f"TRL ({mode}) ÷ ours", "not run: no time left")
            return
        check.progress(f"TRL ({mode}), then our run and rounds of both", TRL_TAKES_S)
        words = ["--no-floor", "--compare", "trl", "--trl-python", sys.executable, "--trl-modes", mode]
        report = bench(check, f"TRL {mode}", words)
        if (ratio := report["ours"]["1"]["all"]["trl_to_ours"].get(f"trl {mode}")) is not None:
            check.figure(f"TRL ({mode}) ÷ ours", ratio, "", ">= 1.0", "samples a micro-batch after the colon")
            return
        check.figure(f"TRL ({mode}) ÷ ours", "does not run here", note=report["trl_failed"].get(mode, "")[-300:])


def bench(check: Check, name: str, words: Sequence[str]) -> dict[str, Any]:
    """The results of scripts/bench/step.py. Its rounds are recorded as they are reported."""
    report_path = check.work / "step.json"
    sizes = ["--prompts", "32", "--samples", "8", "--max-tokens", "512", "--steps", "3", "--micro", "8192"]
    sizes += ["--kv-cache-mb", "4096"]
    if check.rehearse:
        sizes = ["--prompts", "4", "--samples", "4", "--max-tokens", "12", "--steps", "1", "--micro", "1024"]
        sizes += ["--kv-cache-mb", "64"]
    common = ["--model", models.make(check, "0.5b"), "--device", check.device, "--equal-groups", "0", "--rounds"]
    process = subprocess.Popen(
        [sys.executable, str(runs.BENCH / "step.py"), *common, *sizes, "--json", str(report_path), *words],
        stdout=subprocess.PIPE,
        text=True,
    )
    rounds: list[dict[str, float]] = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ROUND "):
            rounds.append(json.loads(line.removeprefix("ROUND ")))
            check.progress(", ".join(f"{name} {seconds:.2f} s" for name, seconds in rounds[-1].items()))
            check.keep(f"{name}: rounds, warm-up included", rounds)
        else:
            print(line, end="", flush=True)
    if process.wait():
        raise CheckFailed(f"scripts/bench/step.py ended with exit code {process.returncode}")
    report: dict[str, Any] = json.loads(report_path.read_text())
    check.keep(name, report)
    return report
