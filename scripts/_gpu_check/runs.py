"""Runs `rlcli train` in a separate process, and follows its steps."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _gpu_check.check import Check, CheckFailed

RLCLI = [sys.executable, "-P", "-m", "rlcli.cli.main"]
BENCH = Path(__file__).resolve().parents[1] / "bench"
REWARD = f"{BENCH / '_step_work.py'}:reward"
"""A verifier whose scores differ within each group, so that random weights have a gradient."""

PROMPT_TOKENS = 32
TOLERANCE = 0.1
"""Largest mean |log π − log μ| of engine and trainer in bfloat16, nats."""

Step = dict[str, Any]


def prompts(check: Check, model: str, count: int) -> str:
    """A folder with `count` prompts of PROMPT_TOKENS tokens by the tokenizer that all generated models share."""
    sys.path.insert(0, str(BENCH))
    from _step_prompts import make_prompts
    from _step_work import Workload, write_prompts

    folder = check.work / "data"
    if not folder.exists():
        texts = make_prompts(model, count, PROMPT_TOKENS)
        write_prompts(Workload(model, PROMPT_TOKENS, 1, 1, ((1,),) * count, prompts=texts), folder, 0.0)
    return str(folder)


def sets(**values: object) -> list[str]:
    """`--set` options for these keys; `__` in a name stands for the dot."""
    return [word for name, value in values.items() for word in ("--set", f"{name.replace('__', '.')}={value}")]


def sizes(check: Check, prompts_per_step: int, samples: int, response: int, micro: int) -> list[str]:
    """`--set` options with the sizes of a run; tiny ones in a rehearsal."""
    if check.rehearse:
        prompts_per_step, samples, response, micro = 2, 4, 12, 256
    return sets(
        rollout__prompts_per_step=prompts_per_step,
        rollout__samples_per_prompt=samples,
        rollout__max_response_tokens=response,
        data__max_prompt_tokens=PROMPT_TOKENS,
        train__tokens_per_microbatch=micro,
        checkpoint__every=0,
        verifier__name=REWARD,
        cluster__device=check.device,
    )


def train(
    check: Check, name: str, words: Sequence[str], on_step: Callable[[list[Step]], None] = lambda steps: None
) -> tuple[list[Step], Path]:
    """Run `rlcli train grpo WORDS`. Returns the metrics of its steps and its folder. Raises `CheckFailed`."""
    run_folder, start_time, seen = check.work / name, time.monotonic(), 0
    # Its output goes to the log of the part, whose end is in the results if the run fails.
    process = subprocess.Popen([*RLCLI, "train", "grpo", *words, "--out", str(run_folder)], stdin=subprocess.DEVNULL)
    while True:
        ended = process.poll() is not None
        steps = read_steps(run_folder)
        for step in steps[seen:]:
            check.progress(f"{name}: step {step['step']} took {step.get('time/step_s', 0.0):.2f} s")
        if len(steps) > seen:
            if not seen:
                check.keep(f"{name}: seconds to the end of the first step", round(time.monotonic() - start_time, 1))
            seen = len(steps)
            on_step(steps)
        if ended:
            break
        time.sleep(0.5)
    if process.returncode:
        for log in sorted(run_folder.glob("logs/*.log")):
            print(
                f"--- the end of {log.name}", *log.read_text(errors="replace").splitlines()[-30:], sep="\n", flush=True
            )
        raise CheckFailed(f"{name}: rlcli train ended with exit code {process.returncode}")
    return steps, run_folder


def read_steps(run_folder: Path) -> list[Step]:
    try:
        text = (run_folder / "metrics.jsonl").read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def plan(words: Sequence[str]) -> dict[str, Any]:
    """The prediction of `rlcli plan grpo WORDS`."""
    done = subprocess.run([*RLCLI, "plan", "grpo", *words, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise CheckFailed(f"rlcli plan ended with exit code {done.returncode}")
    prediction: dict[str, Any] = json.loads(done.stdout)
    return prediction


def check_run(check: Check, name: str, steps: Sequence[Step], expected: int) -> None:
    """Checks for every run: all steps, finite numbers, agreement of engine and trainer, a gradient."""
    check.require(
        [step["step"] for step in steps] == list(range(1, expected + 1)),
        f"{name}: every step is recorded",
        f"{len(steps)} of {expected}",
    )
    odd = [
        f"{key} = {value} at step {step['step']}"
        for step in steps
        for key, value in step.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    check.require(not odd, f"{name}: every metric is finite", "; ".join(odd[:5]))
    worst = max_of(steps, "log_prob_check/mean_abs_diff")
    check.require(
        worst < TOLERANCE, f"{name}: the engine has the trainer's weights after each sync", f"{worst:.4f} nats"
    )
    drift = max((abs(step.get("mismatch/kl", 0.0)) for step in steps), default=0.0)
    check.require(drift < 0.01, f"{name}: sampled tokens have the trainer's probabilities", f"mismatch/kl {drift:.5f}")
    gradient = min((step.get("update/grad_norm", 0.0) for step in steps), default=0.0)
    check.require(gradient > 0, f"{name}: every update has a gradient", f"the smallest norm is {gradient:g}")


def max_of(steps: Sequence[Step], key: str) -> float:
    """The largest value of a metric; infinite if there is none."""
    return max((step.get(key, math.inf) for step in steps), default=math.inf)


def median(steps: Sequence[Step], key: str) -> float:
    """Median of a metric over the steps after the first, which is slower, or over the only step; 0 if none has it."""
    values = [step[key] for step in (steps[1:] or steps) if key in step]
    return statistics.median(values) if values else 0.0
