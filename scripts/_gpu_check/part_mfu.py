"""MFU of real steps with responses of known lengths, in a run of rlcli (scripts/bench/_step_ours.py)."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import Any

from _gpu_check import models, runs
from _gpu_check.check import Check
from _gpu_check.flops import STEP, UPDATE, forward_flops, utilisation

SIZES = {"0.5b": (64, 8, 1024, 16384, 12288), "1.5b": (64, 8, 512, 8192, 16384)}
"""Prompts, samples a prompt, response tokens, tokens of a micro-batch, MiB of KV cache."""
WARM_UP, MEASURED = 1, 3
TARGETS = {"update": ">= 0.30", "step": ">= 0.10"}
"""Targets, not measured on a GPU yet. update: well-tuned dense training of small models reaches 0.35 to 0.5. step: most
of it is decoding, which is bound by memory."""


def run(check: Check) -> None:
    for shape in ["0.5b"] if check.rehearse else list(SIZES):
        measure(check, shape)


def measure(check: Check, shape: str) -> None:
    sys.path.insert(0, str(runs.BENCH))
    from _step_ours import run_ours
    from _step_prompts import make_prompts
    from _step_work import Workload

    model = models.make(check, shape)
    peak, device = peak_flops(check)
    prompts, samples, response, micro, cache = (4, 4, 12, 1024, 64) if check.rehearse else SIZES[shape]
    work = Workload(
        model=model,
        dtype="float32" if check.device == "cpu" else "bfloat16",
        prompt_tokens=runs.PROMPT_TOKENS,
        prompts=make_prompts(model, prompts, runs.PROMPT_TOKENS),
        max_tokens=response,
        micro=micro,
        lengths=((response,) * samples,) * prompts,
    )
    forward = forward_flops(shape_of_model(model), work.prompt_tokens, work.lengths)
    check.figure(f"{shape}: peak of the device", peak / 1e12, "TFLOP/s", note=device)
    check.figure(f"{shape}: operations of an update", UPDATE * forward / 1e12, "TFLOP", note="3 F of flops.py")
    steps = WARM_UP + (1 if check.rehearse else MEASURED)
    check.progress(f"{shape}: {steps} steps of {prompts * samples} responses of {response} tokens", 120)
    # The workload has two kinds of steps, of unequal and of equal rewards; all of these are of the first kind.
    with run_ours(work, steps=steps, workers=1, device=check.device, kv_cache_mb=cache, equal=0.0) as train:
        seen: list[Any] = []

        def between() -> None:
            check.progress(f"{shape}: step {len(seen) + 1} of {steps} is done")
            seen.append(None)

        steps_done = train(between)
    report(check, shape, work, steps_done[WARM_UP:], forward, peak)


def report(check: Check, shape: str, work: Any, steps: Any, forward: float, peak: float) -> None:
    phases = [step.phases() for step in steps]
    update = statistics.median(each["update"] for each in phases)
    generate = statistics.median(each["generate"] for each in phases)
    seconds = statistics.median(step.seconds for step in steps)
    note = f"{update:.2f} s of a step of {seconds:.2f} s"
    used = utilisation(UPDATE * forward, update, peak)
    check.figure(f"{shape}: MFU of the update", used, "", TARGETS["update"], note=note)
    used = utilisation(STEP * forward, seconds, peak)
    check.figure(f"{shape}: MFU of the step", used, "", TARGETS["step"], note="generation counts as one forward pass")
    rate = work.response_tokens / generate
    check.figure(
        f"{shape}: rollout", rate, "tokens/s", note=f"{len(work.prompts) * work.samples} responses in {generate:.2f} s"
    )
    check.figure(f"{shape}: update", work.tokens / update, "tokens/s", note="prompts counted for each sample")
    check.keep(shape, {"phases": phases, "seconds": [step.seconds for step in steps]})


def shape_of_model(model: str) -> Any:
    from rlcli_planner.model_shape import shape_of

    from rlcli.model.io.model_config import read_config

    return shape_of(read_config(model))


def peak_flops(check: Check) -> tuple[float, str]:
    """Peak operations a second, and the device's name. GPU: dense bfloat16 by its data sheet
    (rlcli_planner.known_devices.TABLE); CPU: the fastest measured matrix product."""
    from rlcli_planner.known_devices import of_machine
    from rlcli_planner.machine.machine_rates import machine_rates

    from rlcli.cluster.ray_session import worker_threads

    if check.rehearse:
        rates = machine_rates("cpu", "float32", worker_threads(1), 1)
        check.require(rates is not None, "the rates of this machine are known", "rlcli plan … --measure")
        peak = max(rate for rows in rates.products for rate in rows) if rates is not None else float("nan")
        return peak, "CPU, the fastest of the measured products"
    command = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", visible())
    name = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    device = of_machine(name, 0.0)
    check.require(
        device.has_rates, "the peak of this GPU is known", f"{name}: add it to packages/rlcli_planner/known_devices.py"
    )
    return device.flops or float("nan"), f"{name}, as {device.name}, dense bfloat16"


def visible() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
