"""Other ways to train the real model than the quickstart's: does each learn in a few steps?

    .venv/bin/python scripts/proofs/real_model.py [--only lora dapo ppo tool] [--steps 10] [--seed 0] [--json FILE]
        [--folder DIR]
    .venv/bin/python scripts/proofs/real_model.py --only float32 bfloat16 float16 --steps 25

Trains SmolLM2-135M-Instruct on the word problems of `rlcli quickstart --task words`, 16 prompts a step, on one worker:

lora     GRPO on an adapter of rank 16
dapo     DAPO: dynamic sampling, clip-higher, a soft length limit
ppo      PPO: a critic of the same size
tool     GRPO on conversations with a calculator, in two turns; the chat template, which the model does not know, shows
         the tool and an example of a call
float32, bfloat16, float16
         GRPO in this precision at a learning rate of 1e-5, 8 prompts a step: do rounded weights show small updates?

Prints a table: greedy pass@1 before and after, the sampled reward of the first and the last fifth of the steps (two or
more), calls of the tool a conversation, seconds a step, and every warning. Exit code 1 if a run fails. The model is
downloaded once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table
from rlcli_quickstart.smollm2 import NAME, real_model

from rlcli.runs.folder import events_of
from rlcli.runs.record_files import evaluations_of, metrics_of
from rlcli.support.files import cache_folder

COMMAND = [sys.executable, "-P", "-m", "rlcli.cli.main"]
RECIPES = {"dapo": "dapo", "ppo": "ppo"}
"""Of tasks that are not trained by `grpo`."""
SETTINGS = (
    *("train.betas=[0.9,0.99]", "train.warmup_steps=1", "algorithm.clip_high=0.28", "data.max_prompt_tokens=96"),
    *("rollout.prompts_per_step=16", "rollout.samples_per_prompt=8", "rollout.max_response_tokens=32"),
    *("train.minibatches=1", "evaluation.max_prompts=128", "evaluation.every=0", "checkpoint.every=0"),
    "tracking.trackers=",
)
OWN: dict[str, tuple[str, ...]] = {
    "lora": ("lora.rank=16", "train.lr=1e-3"),
    "dapo": ("train.lr=3e-5", "shaping.overlong_buffer=8"),
    "ppo": ("train.lr=3e-5", "critic.lr=1e-4", "critic.warmup_steps=1"),
    "tool": (
        *("train.lr=3e-5", "environment.name=calculator", "environment.turns=2", "environment.turn_tokens=48"),
        *("environment.reply_chars=16", "data.max_prompt_tokens=224", "rollout.max_response_tokens=96"),
    ),
} | {
    dtype: (f"model.dtype={dtype}", "train.lr=1e-5", "rollout.prompts_per_step=8")
    for dtype in ("float32", "bfloat16", "float16")
}
TOOL_TEMPLATE = """\
{{- '<|im_start|>system\\nUse the tool to calculate. Example: for 12 and 7 write\\n<tool_call>' -}}
{{- '{"name": "calculate", "arguments": {"expression": "12 + 7"}}</tool_call>\\n' -}}
{{- 'Then answer with the result.\\nTools:' -}}
{%- for tool in tools or [] -%}{{- ' ' ~ tool.function.name -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


@dataclass(frozen=True)
class Row:
    """One run."""

    name: str
    """Name of the task."""
    exit: int
    """Exit status of its command."""
    steps: int
    """Steps completed."""
    before: float
    """Greedy pass@1 on 128 held-out problems before training."""
    after: float
    """Greedy pass@1 on the same problems after training."""
    rewards: list[float]
    """Sampled reward of each step."""
    calls: float
    """Tool calls per conversation in the last two steps."""
    step_s: float
    """Median step seconds."""
    warnings: tuple[str, ...]
    """Names of all warnings raised by the run."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(OWN), default=["lora", "dapo", "ppo", "tool"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs are kept")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, rows = cache_folder() / NAME, []
    real_model(model)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "data").exists():
            subprocess.run([*COMMAND, "prep", "words", "--out", str(folder / "data")], check=True)
        for name in options.only:
            source = with_tools(model, folder / "with-tools") if name == "tool" else model
            rows.append(trained(name, source, folder, options.steps, options.seed))
            show(rows[-1:])
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return int(any(row.exit for row in rows))


def with_tools(model: Path, folder: Path) -> Path:
    """The model with another chat template."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE, encoding="utf-8")
    return folder


def trained(name: str, model: Path, folder: Path, steps: int, seed: int) -> Row:
    run, data = folder / name, str(folder / "data")
    recipe = RECIPES.get(name, "grpo")
    words = ["train", recipe, "--model", str(model), "--data", data, "--eval-data", data, "--out", str(run)]
    sets = [word for setting in (*SETTINGS, *OWN[name], f"train.seed={seed}") for word in ("--set", setting)]
    command = [*COMMAND, *words, "--steps", str(steps), "--workers", "1", "--force", *sets]
    with (folder / f"{name}.log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=log, check=False)
    lines: list[dict[str, Any]] = [line for line in metrics_of(run) if line["step"]] if run.exists() else []
    evaluations = evaluations_of(run) if run.exists() else {}
    if not lines or not evaluations:
        return Row(name, done.returncode or 1, len(lines), 0.0, 0.0, [], 0.0, 0.0, ())
    return Row(
        name,
        done.returncode,
        len(lines),
        *(evaluations[step]["pass"]["pass@1"]["mean"] for step in (min(evaluations), max(evaluations))),
        [line["reward/mean"] for line in lines],
        fmean(line.get("tool_calls/mean", 0.0) for line in lines[-2:]),
        median(line["time/step_s"] for line in lines),
        tuple(sorted({str(event["name"]) for event in events_of(run) if event["event"] == "warning"})),
    )


def show(rows: list[Row]) -> None:
    table = Table("run", "steps", "greedy before → after", "sampled reward", "calls", "step, s", "warnings")
    for row in rows:
        ends = max(2, len(row.rewards) // 5)
        first, last = (fmean(rewards or [0.0]) for rewards in (row.rewards[:ends], row.rewards[-ends:]))
        table.add_row(
            row.name,
            str(row.steps) if not row.exit else f"{row.steps}, exit {row.exit}",
            f"{100 * row.before:.1f}% → {100 * row.after:.1f}%",
            f"{first:.2f} → {last:.2f}",
            f"{row.calls:.2f}",
            f"{row.step_s:.1f}",
            ", ".join(row.warnings) or "none",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
