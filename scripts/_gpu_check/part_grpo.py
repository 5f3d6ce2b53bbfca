"""GRPO steps with a model of a real shape, through the command line, with either engine."""

from __future__ import annotations

import json
from typing import Any

from _gpu_check import models, runs
from _gpu_check.check import Check

STEPS = {"0.5b": 6, "1.5b": 4}
SIZES = {"0.5b": (32, 8, 512, 16384), "1.5b": (32, 8, 256, 8192)}
"""Prompts a step, samples a prompt, response tokens, tokens of a micro-batch."""
PLAIN_STEPS, PLAIN_SIZES = 3, (32, 8, 64, 16384)
"""For the engine `transformers`, which takes some 40 ms for each token of 256 concurrent responses."""

FIGURES = (
    ("time/step_s", "step", "s"),
    ("time/generate_s", "generation", "s"),
    ("time/update_s", "update", "s"),
    ("time/sync_s", "weight sync, with its check", "s"),
    ("throughput/rollout_tokens_per_s", "rollout", "tokens/s"),
    ("throughput/update_tokens_per_s", "update", "tokens/s"),
    ("throughput/sync_gb_per_s", "weight sync", "GB/s"),
)


def run(check: Check, shape: str, engine: str) -> None:
    plain = engine == "transformers"
    shape = check.shape if plain else shape
    model = models.make(check, shape)
    sizes = PLAIN_SIZES if plain else SIZES[shape]
    steps_wanted = 2 if check.rehearse else PLAIN_STEPS if plain else STEPS[shape]
    words = ["--model", model, "--data", runs.prompts(check, model, 64), "--steps", str(steps_wanted), "--workers", "1"]
    check.progress(f"rlcli train grpo, {steps_wanted} steps", 60)

    def on_step(steps: list[runs.Step]) -> None:
        for key, name, unit in FIGURES:
            check.figure(f"{name}, {unit}", runs.median(steps, key), unit, note="median of the steps after the first")
        check.figure(
            "engine against trainer, mean", runs.max_of(steps, "log_prob_check/mean_abs_diff"), "nats", "<= 0.1"
        )

    words += [*runs.sizes(check, *sizes), *runs.sets(rollout__engine=engine)]
    steps, run_folder = runs.train(check, shape, words, on_step)
    runs.check_run(check, shape, steps, steps_wanted)
    check_bytes(check, shape, model, steps)
    for phase in ("generate", "update", "sync"):
        check.figure(f"memory, {phase}", runs.max_of(steps, f"memory/{phase}_gb"), "GiB", note="peak over the steps")
    check.keep("startup", startup(run_folder))
    check.keep("steps", steps)


def check_bytes(check: Check, shape: str, model: str, steps: list[runs.Step]) -> None:
    """Check that each sync sends every weight once, in the engine's dtype, and that the engine holds each of them."""
    from rlcli_planner.model_shape import shape_of

    from rlcli.model.io.model_config import read_config

    model_bytes = shape_of(read_config(model)).parameters * (4 if check.rehearse else 2)
    sent = {step["sync/bytes"] for step in steps if "sync/bytes" in step}
    check.require(sent == {model_bytes}, f"{shape}: a sync sends all weights", f"{sent} of {model_bytes} bytes")
    held = {(step.get("sync/checked_tensors", 0), step.get("sync/unchecked_tensors", 0)) for step in steps}
    holds = all(checked > 0 and not unchecked for checked, unchecked in held)
    check.require(holds, f"{shape}: the engine holds all tensors exactly", f"(compared, not compared): {held}")


def startup(run_folder: Any) -> dict[str, Any]:
    """The run's event `startup`; empty if there is none."""
    for line in (run_folder / "events.jsonl").read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        if "startup" in event.values():
            return event
    return {}
