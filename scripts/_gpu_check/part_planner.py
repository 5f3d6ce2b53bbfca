"""Compares the memory that `rlcli plan` predicts with the measured peaks of the same runs, by phase."""

from __future__ import annotations

from _gpu_check import models, runs
from _gpu_check.check import Check

CASES: dict[str, list[str]] = {
    "whole": [],
    "checkpointing": runs.sets(model__gradient_checkpointing="true"),
    "lora": runs.sets(lora__rank=16, train__lr=1e-4),
    "reference, offload": runs.sets(algorithm__kl_coef=0.01, train__offload="optimizer"),
}
PHASES = ("generate", "update", "sync")
STEPS = 3
TAKES_S = 60.0
"""Seconds of one case: none starts with less time left."""
CLOSE = 0.08
"""Largest relative error of a prediction."""


def run(check: Check) -> None:
    model = models.make(check, check.shape)
    data = runs.prompts(check, model, 64)
    # One case in a rehearsal: the others differ in features of GPUs.
    for name, overrides in list(CASES.items())[: 1 if check.rehearse else None]:
        if check.remaining_s < TAKES_S and not check.rehearse:
            check.figure(f"{name}", "not run: no time left")
            continue
        words = ["--model", model, "--data", data, "--workers", "1", *runs.sizes(check, 16, 8, 512, 16384), *overrides]
        words += runs.sets(train__steps=2 if check.rehearse else STEPS, rollout__gpu_memory_utilization=0.4)
        check.progress(f"{name}: predict, then run", 55)
        predicted = runs.plan(words)["memory"]
        steps, _ = runs.train(check, name.replace(", ", "-"), words)
        runs.check_run(check, name, steps, 2 if check.rehearse else STEPS)
        for phase in PHASES:
            compare(check, name, phase, predicted[f"{phase}_gb"]["total"], runs.max_of(steps, f"memory/{phase}_gb"))
        check.keep(name, {"predicted": predicted, "steps": steps})


def compare(check: Check, name: str, phase: str, predicted: float, measured: float) -> None:
    """error: (predicted − measured) ÷ measured."""
    error = predicted / measured - 1
    check.figure(
        f"{name}, {phase}: error",
        100 * abs(error),
        "%",
        f"<= {100 * CLOSE:.0f}",
        note=f"predicted {predicted:.2f} GiB, measured {measured:.2f} GiB ({100 * error:+.1f}%)",
    )
