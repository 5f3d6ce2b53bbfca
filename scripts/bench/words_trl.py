"""TRL compared with a run of rlcli: GRPOTrainer with the same model, data, reward and hyper-parameters as a run folder.

    rlcli train grpo --model MODEL --data DATA --eval-data DATA --set evaluation.every=8 … --out runs/ours
    .venv/bin/python scripts/bench/words_trl.py runs/ours --trl-python PYTHON --out trl.json [--mode vllm]

PYTHON is an interpreter that imports TRL and this project (docs/performance.md). TRL generates and trains; rewards and
evaluations come from the run's verifier, learning rates from its schedule. Evaluations are greedy, before the first
step, every `evaluation.every` steps and at the end; they are not part of a step's seconds, neither here nor in the run.
Written after each step to FILE: `steps` (step, seconds, reward, truncated, tokens) and `evaluations` (step, mean, low,
high). Printed at the end: the steps and seconds to the same score, of both.

Refused: a run with settings that TRL does not have, or that this program does not translate.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from rlcli.api.run import Run
from rlcli.config.changes import read_run_config
from rlcli.config.load import Resolved
from rlcli.config.recipes import flatten
from rlcli.config.schema import RunConfig

LOSS_TYPES = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
"""Our aggregation → TRL's loss_type, all with the loss of PPO."""

TRANSLATED = {
    *("algorithm.scale", "algorithm.clip_low", "algorithm.clip_high", "algorithm.aggregation", "algorithm.kl_coef"),
    *("rollout.prompts_per_step", "rollout.samples_per_prompt", "rollout.max_response_tokens"),
    *("rollout.temperature", "rollout.top_p", "model.gradient_checkpointing", "model.dtype", "model.path"),
    *("train.steps", "train.seed", "train.lr", "train.betas", "train.weight_decay", "train.warmup_steps"),
    *("train.schedule", "train.min_lr_fraction", "train.max_grad_norm", "train.truncated"),
    *("data.path", "data.max_prompt_tokens", "data.shuffle"),
}
"""Keys that become settings of TRL's."""

IRRELEVANT = {
    *("algorithm.mismatch_warning", "rollout.engine", "rollout.kv_cache_mb", "rollout.max_concurrent"),
    *("rollout.gpu_memory_utilization", "rollout.enforce_eager", "rollout.log_prob_check", "rollout.workers"),
    *("train.tokens_per_microbatch", "train.offload", "train.deterministic", "model.compile"),
}
"""Keys that change how a run computes, or when it warns, but not what it learns."""

UNRELATED = {"critic", "verifier", "cluster", "parallel", "checkpoint", "fault_tolerance", "evaluation", "tracking"}
"""Sections that concern no update, or not with the advantage of GRPO."""

WINDOW = 3
"""Steps of which the mean reward is compared: that of one step is noisy."""
SCORES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9)


def main() -> int:
    options = parse()
    resolved = read_run_config(options.run)
    if unknown := untranslated(resolved):
        raise SystemExit(f"{options.run} has settings that TRL does not get: {', '.join(unknown)}")
    settings = settings_of(resolved.config, options)
    result = train(settings, options.trl_python, options.out)
    show(Run(options.run), result)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run of rlcli train")
    parser.add_argument("--trl-python", required=True, help="an interpreter that imports trl and rlcli")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the result")
    parser.add_argument("--data", default="", help="folder with train.parquet and test.parquet; default: the run's")
    parser.add_argument("--model", default="", help="folder of the model; default: the run's")
    parser.add_argument("--mode", choices=["generate", "vllm"], default="generate", help="what TRL generates with")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the run, if its model.dtype is auto")
    parser.add_argument("--micro", type=int, default=32, help="per_device_train_batch_size")
    parser.add_argument("--steps", type=int, help="steps to do; schedules stay those of the run")
    parser.add_argument("--eval-every", type=int, help="steps between evaluations; default: the run's")
    parser.add_argument("--eval-prompts", type=int, help="held-out problems; default: the run's; 0: all")
    parser.add_argument("--eval-batch", type=int, default=64, help="problems that are answered at once")
    parser.add_argument("--kv-cache-mb", type=int, default=1024, help="of vLLM on a CPU")
    return parser.parse_args()


def untranslated(resolved: Resolved) -> list[str]:
    """KEY = VALUE of what the run has set and TRL would not do."""
    defaults = flatten(RunConfig().model_dump(mode="json", by_alias=True))
    return [
        f"{key} = {value}"
        for key, value in resolved.values().items()
        if key not in TRANSLATED | IRRELEVANT and key.partition(".")[0] not in UNRELATED and value != defaults[key]
    ]


def settings_of(config: RunConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Settings file of `_words_trl_child.py`. trl: arguments of GRPOConfig."""
    algorithm, rollout, train = config.algorithm, config.rollout, config.train
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    if samples % options.micro:
        raise SystemExit(f"--micro {options.micro} does not divide the {samples} samples of a step")
    dtype = options.dtype or config.model.dtype
    if dtype == "auto":
        raise SystemExit("the run's model.dtype is auto: name with --dtype what the first line of its log says")
    low = 0.2 if algorithm.clip_low is None else algorithm.clip_low
    data = options.data or config.data.paths[0]
    held_out = options.data or (config.evaluation.paths or config.data.paths)[0]
    return {
        "model": options.model or config.model.path,
        "dtype": dtype,
        "data": data,
        "held_out": held_out,
        "verifier": config.verifier.name,
        "deadline_s": config.verifier.deadline_s,
        "max_prompt_tokens": config.data.max_prompt_tokens,
        "zero_truncated": train.truncated == "zero_reward",
        "mode": options.mode,
        "kv_cache_bytes": options.kv_cache_mb << 20,
        "steps": options.steps or train.steps,
        "evaluate_every": config.evaluation.every if options.eval_every is None else options.eval_every,
        "evaluate_prompts": config.evaluation.max_prompts if options.eval_prompts is None else options.eval_prompts,
        "evaluate_batch": options.eval_batch,
        "schedule": {
            "peak": train.lr,
            "steps": train.steps,
            "warmup_steps": train.warmup_steps,
            "schedule": train.schedule,
            "min_fraction": train.min_lr_fraction,
        },
        "trl": {
            "learning_rate": train.lr,
            "adam_beta1": train.betas[0],
            "adam_beta2": train.betas[1],
            "weight_decay": train.weight_decay,
            "max_grad_norm": train.max_grad_norm,
            "seed": train.seed,
            "num_generations": rollout.samples_per_prompt,
            "max_completion_length": rollout.max_response_tokens,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "shuffle_dataset": config.data.shuffle,
            "per_device_train_batch_size": options.micro,
            "gradient_accumulation_steps": samples // options.micro,
            "gradient_checkpointing": bool(config.model.gradient_checkpointing),
            "beta": algorithm.kl_coef,
            "epsilon": low,
            "epsilon_high": 0.2 if algorithm.clip_high is None else algorithm.clip_high,
            "scale_rewards": algorithm.scale,
            "loss_type": LOSS_TYPES[algorithm.aggregation],
            "mask_truncated_completions": train.truncated == "mask",
            # As our correction token_tis does; only with vLLM are there log-probs of an engine.
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 2.0,
        },
    }


def train(settings: Mapping[str, Any], python: str, report_path: Path) -> dict[str, Any]:
    """Run TRL in its interpreter, which writes `report_path` after each step; the result. Its output
    goes to that path with the suffix .log."""
    log = report_path.with_suffix(".log")
    environment = os.environ | {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    report_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="words-trl-") as folder, log.open("w") as output:
        file = Path(folder) / "settings.json"
        file.write_text(json.dumps({**settings, "folder": folder, "out": str(report_path.resolve())}))
        child = [python, str(Path(__file__).with_name("_words_trl_child.py")), str(file)]
        code = subprocess.run(child, env=environment, stdout=subprocess.PIPE, stderr=output).returncode
    if code:
        last = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        raise SystemExit(f"TRL ended with {code}: {last} ({log})")
    result: dict[str, Any] = json.loads(report_path.read_text())
    return result


def to_reward(rewards: Sequence[float], seconds: Sequence[float], score: float) -> tuple[int, float] | None:
    """Steps, and seconds of training, until the mean reward of WINDOW steps has reached `score`.

    >>> to_reward([0.0, 0.2, 0.4, 0.6], [1.0, 1.0, 1.0, 2.0], 0.4)
    (4, 5.0)
    """
    for step, elapsed in enumerate(accumulate(seconds), 1):
        if step >= WINDOW and fmean(rewards[step - WINDOW : step]) >= score - 1e-9:
            return step, elapsed
    return None


def to_greedy(evaluations: Mapping[int, float], seconds: Sequence[float], score: float) -> tuple[int, float] | None:
    """Steps, and seconds of training, until an evaluation has reached `score`.

    >>> to_greedy({0: 0.3, 2: 0.5}, [1.0, 2.0], 0.4)
    (2, 3.0)
    """
    for step in sorted(evaluations):
        if evaluations[step] >= score:
            return step, sum(seconds[:step])
    return None


def show(run: Run, result: Mapping[str, Any]) -> None:
    metrics = run.metrics()
    steps = [
        (math.nan if reward is None else reward, took)
        for reward, took in zip(metrics["reward/mean"], metrics["time/step_s"], strict=True)
        if took is not None  # the line of the evaluation before the first step
    ]
    rewards, seconds = {"ours": [reward for reward, _ in steps]}, {"ours": [took for _, took in steps]}
    greedy = {"ours": {step: report["pass"]["pass@1"]["mean"] for step, report in run.evaluations.items()}}
    rewards["TRL"] = [step["reward"] for step in result["steps"]]
    seconds["TRL"] = [step["seconds"] for step in result["steps"]]
    greedy["TRL"] = {report["step"]: report["mean"] for report in result["evaluations"]}
    table = Table("", "ours", "TRL", "TRL ÷ ours, seconds", title="steps and seconds of training to the same score")
    for score in SCORES:
        for milestone, reached in (
            (f"reward {score:g}, {WINDOW} steps", {n: to_reward(rewards[n], seconds[n], score) for n in rewards}),
            (f"greedy {score:g}", {n: to_greedy(greedy[n], seconds[n], score) for n in rewards}),
        ):
            if any(reached.values()):
                cells = [f"{at[0]}, {at[1]:.0f} s" if at else "–" for at in reached.values()]
                ours, trl = reached.values()
                table.add_row(milestone, *cells, f"{trl[1] / ours[1]:.2f}" if ours and trl and ours[1] else "–")
    Console().print(table)
    for name in rewards:
        last = max(greedy[name], default=None)
        score = f", greedy {greedy[name][last]:.3f} after {last}" if last is not None else ""
        print(f"{name}: {len(seconds[name])} steps, {sum(seconds[name]):.0f} s of training{score}")


if __name__ == "__main__":
    sys.exit(main())
