"""scripts/bench/step.py: whole steps, their floor and TRL's, in turn in one run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from _gpu_check import models, runs
from _gpu_check.check import Check, CheckFailed

TRL_MODES = ("vllm:16", "generate:16")
"""With 16 samples a micro-batch: TRL holds the logits of all of their tokens."""
TARGET = "<= 1.10"
"""Step ÷ floor; on CPUs it is 0.82 to 0.96 (docs/performance.md)."""


def run(check: Check) -> None:
    out, model = check.work / "step.json", models.make(check, "0.5b")
    has_trl = find_spec("trl") is not None
    words = ["--model", model, "--device", check.device, "--equal-groups", "0", "--rounds", "--json", str(out)]
    if check.rehearse:
        words += ["--prompts", "4", "--samples", "4", "--max-tokens", "12", "--steps", "1", "--micro", "1024"]
        words += ["--kv-cache-mb", "64", "--fixed-micro"]
    else:
        words += ["--prompts", "32", "--samples", "8", "--max-tokens", "512", "--steps", "3", "--micro", "8192"]
        words += ["--kv-cache-mb", "4096"]
    if has_trl and not check.rehearse:
        words += ["--compare", "trl", "--trl-python", sys.executable, "--trl-modes", ",".join(TRL_MODES)]
    check.progress("raw vLLM and raw torch start, then TRL where it is installed, then our run", 150)
    process = subprocess.Popen(
        [sys.executable, "-P", str(runs.BENCH / "step.py"), *words], stdout=subprocess.PIPE, text=True
    )
    rounds: list[dict[str, float]] = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ROUND "):
            rounds.append(json.loads(line.removeprefix("ROUND ")))
            check.progress(", ".join(f"{name} {seconds:.2f} s" for name, seconds in rounds[-1].items()))
            check.keep("rounds, warm-up included", rounds)
        else:
            print(line, end="", flush=True)
    if process.wait():
        raise CheckFailed(f"scripts/bench/step.py ended with exit code {process.returncode}")
    report(check, json.loads(out.read_text()), has_trl)


def report(check: Check, found: dict[str, Any], has_trl: bool) -> None:
    check.keep("step", found)
    ours = found["ours"]["1"]["all"]
    check.figure("step ÷ floor", ours["to_floor"], "", TARGET, note="median of the rounds' quotients")
    check.figure("our step", ours["seconds"], "s")
    check.figure("floor: raw vLLM", found["medians"]["generate 1"], "s")
    check.figure("floor: raw torch", found["medians"]["train 1"], "s")
    for phase, seconds in ours["phases"].items():
        if seconds > 5e-4:
            check.figure(f"our {phase.replace('_', ' ')}", seconds, "s")
    for mode in TRL_MODES:
        name = f"TRL ({mode.partition(':')[0]}) ÷ ours"
        if (value := ours["trl_to_ours"].get(f"trl {mode}")) is not None:
            check.figure(name, value, "", ">= 1.0")
        else:
            failed = {key: value for key, value in found["trl_failed"].items() if key == mode}
            why = "; ".join(map(str, failed.values()))[:200] if has_trl else "not installed"
            check.figure(name, why or "not run in a rehearsal")
    check.require(ours["seconds"] > 0, "a step was measured", f"{ours['seconds']:.3f} s")
