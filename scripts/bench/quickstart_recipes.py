"""The catalog's recipes on the quickstart's task: does each raise the reward of the same warm start?

    .venv/bin/python scripts/bench/quickstart_recipes.py --out DIR [RECIPE…] [--seeds 1] [--steps 30] [--engine vllm]
    … --settings

Trains the recipes one after another on the tiny model that `rlcli quickstart` warms up; prints a table, writes
DIR/results.json and draws DIR/recipes.png. A run that DIR holds already, with the same settings, is not repeated. Exits
with 1 unless each run raises greedy pass@1 with disjoint 95% intervals. `--settings` prints the overrides, no more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from _quickstart import evaluations, percent, rlcli

from rlcli.config.load import to_toml
from rlcli.config.recipes import load

TIMES = 200
"""Factor of a recipe's learning rates: the quickstart's rate relative to grpo's, on which the recipes base theirs."""

SHRUNK: dict[str, dict[str, Any]] = {
    "ppo": {},
    "dapo": {"rollout.samples_per_prompt": 8, "shaping.overlong_buffer": 10},
    "rloo": {},
    "remax": {},
    "reinforce_pp": {},
    "gspo": {},
    "grpo": {},
    "dr_grpo": {},
    "cispo": {"train.minibatches": 4},
    "gmpo": {},
    "sapo": {},
    "maxrl": {"rollout.prompts_per_step": 16},
    "vapo": {"rollout.samples_per_prompt": 8, "critic.warmup_steps": 10, "algorithm.options.alpha": 25.0},
    "pf_ppo": {"rollout.prompts_per_step": 32},
    "prime": {},
    "dpo": {},
    "sppo": {},
    "rft": {},
    "sft": {"evaluation.every": 10},
}
"""Overrides of a recipe, added to `common`: 256 samples a step, as grpo has; counts of tokens or steps in proportion.

vapo's λ is 1 − 1 / (αl), with an α of 0.05 for responses of thousands of tokens. At 24 tokens that makes λ = 0.17:
next to nothing but a critic that young would be heard. 25 is to 40 tokens about what 0.05 is to the paper's 20480.
"""

TABLE = "| recipe | seed | pass@1 before | pass@1 after | sampled reward, first → last step | a step | in all |"


def common() -> dict[str, Any]:
    """Values of quickstart.toml except its algorithm and the keys that every recipe here sets itself or by flag."""
    quickstart, left_out = load("quickstart"), ("train.steps", "train.lr")
    settings = {key: value for key, value in quickstart.values.items() if quickstart.origins[key] == "quickstart"}
    return {key: value for key, value in settings.items() if not key.startswith("algorithm.") and key not in left_out}


def overrides(recipe: str) -> dict[str, Any]:
    """Overrides of `recipe` in addition to `common`: learning rates for a tiny model, and sizes."""
    values = load(recipe).values
    rates = {"train.lr": values["train.lr"]}
    if values.get("algorithm.advantage") in ("gae", "vapo", "prime"):
        rates["critic.lr"] = values.get("critic.lr", 1e-5)
    return {key: float(f"{TIMES * rate:.3g}") for key, rate in rates.items()} | SHRUNK[recipe]


def settings_table() -> str:
    """The overrides as the documentation quotes them."""
    rows = ["| recipe | overrides |", "|---|---|", f"| all | {_sets(common())} |"]
    return "\n".join(rows + [f"| `{recipe}` | {_sets(overrides(recipe))} |" for recipe in SHRUNK])


def _sets(values: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}={to_toml(value)}`" for key, value in values.items())


def prepare(seed: int, folder: Path) -> tuple[Path, Path]:
    """Data and warm start of `seed`, as `rlcli quickstart` makes them."""
    from rlcli_quickstart.sum_lessons import Sums
    from rlcli_quickstart.warm_start import warm_start

    data = folder / f"data-{seed}"
    if not data.exists():
        rlcli("prep", "arithmetic", "--seed", str(seed), "--out", str(data))
    return data, warm_start(folder / "cache", Sums(data), seed).path


def run(recipe: str, seed: int, steps: int, folder: Path, engine: str = "vllm") -> dict[str, Any]:
    """Train, or read what an equal run has left; the figures that the table and the plot show."""
    settings = common() | overrides(recipe) | ({} if engine == "vllm" else {"rollout.engine": engine})
    settings["train.warmup_steps"] = min(settings["train.warmup_steps"], steps)
    arguments = {"recipe": recipe, "seed": seed, "steps": steps, "settings": settings}
    file = folder / f"{recipe}-{seed}.json"
    if file.exists() and (result := json.loads(file.read_text())).items() >= arguments.items():
        return dict(result)
    data, model = prepare(seed, folder)
    run_folder = folder / f"{recipe}-{seed}"
    words = [
        "train",
        recipe,
        "--model",
        str(model),
        "--data",
        str(data),
        "--eval-data",
        str(data),
        "--out",
        str(run_folder),
    ]
    words += ["--seed", str(seed), "--steps", str(steps), "--force"]
    words += ["--workers", str(min(2, len(os.sched_getaffinity(0))))]
    words += [word for key, value in settings.items() for word in ("--set", f"{key}={to_toml(value)}")]
    result, seconds = rlcli(*words, log=folder / f"{recipe}-{seed}.log")
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["step"] > 0]
    figures = {
        **arguments,
        # Of all that was generated: what dynamic sampling leaves out counts too. Where nothing was, there is none: in
        # supervised training, and in steps that groups of an earlier one fill.
        "rewards": {line["step"]: line["reward/generated"] for line in trained if "reward/generated" in line},
        "evaluations": evaluations(result),
        "step_s": fmean(line["time/step_s"] for line in trained),
        "seconds": seconds,
    }
    file.write_text(json.dumps(figures, indent=2) + "\n")
    return dict(json.loads(file.read_text()))


def learned(result: dict[str, Any]) -> bool:
    first, *_, last = result["evaluations"].values()
    return bool(first["high"] < last["low"])


def row(result: dict[str, Any]) -> str:
    first, *_, last = result["evaluations"].values()
    sampled = list(result["rewards"].values())
    rewards = f"{sampled[0]:.2f} → {sampled[-1]:.2f}" if sampled else "–"
    times = f"{result['step_s']:.1f} s | {result['seconds']:.0f} s"
    return f"| `{result['recipe']}` | {result['seed']} | {percent(first)} | {percent(last)} | {rewards} | {times} |"


def draw(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """One small panel a recipe, all on the same axes: curves of reward, and pass@1 before and after."""
    from matplotlib.figure import Figure

    recipes = list(dict.fromkeys(result["recipe"] for result in results))
    rows = -(-len(recipes) // 6)
    columns = -(-len(recipes) // rows)
    figure = Figure(figsize=(1.0 + 1.75 * columns, 0.7 + 1.55 * rows), dpi=130, layout="constrained")
    panels: list[Any] = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for panel, recipe in zip(panels, recipes, strict=False):
        _panel(panel, recipe, [result for result in results if result["recipe"] == recipe])
    for lowest in panels[len(recipes) - columns : len(recipes)]:
        lowest.tick_params(labelbottom=True)
    for empty in panels[len(recipes) :]:
        empty.set_axis_off()
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("reward", fontsize=9)
    legend = "line: mean reward of a step's samples   ●: greedy pass@1 on held-out sums, 95% interval"
    figure.suptitle(legend, fontsize=9)
    figure.savefig(path, format="png")


def _panel(axes: Any, recipe: str, runs: Sequence[dict[str, Any]]) -> None:
    from rlcli.runs.tracking.plots import BLUE, FAINT, RED

    for result in reversed(runs):  # the first seed on top
        first = result is runs[0]
        steps, rewards = [int(step) for step in result["rewards"]], list(result["rewards"].values())
        axes.plot(steps, rewards, color=BLUE if first else FAINT, linewidth=1.6 if first else 1.2)
    marks = {int(step): estimate for step, estimate in runs[0]["evaluations"].items()}
    means = [estimate["mean"] for estimate in marks.values()]
    reach = [
        [estimate["mean"] - estimate["low"] for estimate in marks.values()],
        [estimate["high"] - estimate["mean"] for estimate in marks.values()],
    ]
    axes.errorbar(list(marks), means, reach, color=RED, fmt="o", markersize=3.5, capsize=2, clip_on=False, zorder=3)
    axes.set_title(recipe, fontsize=9, loc="left", family="monospace", pad=9)
    axes.set_title(f"{means[0]:.1%} → {means[-1]:.1%}", fontsize=7, loc="right", color=RED, pad=9)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1])
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="default: all that are set up here")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--engine", default="vllm", help="as rollout.engine")
    parser.add_argument("--settings", action="store_true", help="print the overrides and leave")
    arguments = parser.parse_args()
    if arguments.settings:
        print(settings_table())
        return 0
    if arguments.out is None:
        parser.error("--out DIR is needed: the folder for runs, figures and plot")
    if unknown := [recipe for recipe in arguments.recipes if recipe not in SHRUNK]:
        parser.error(f"not set up for the tiny model: {', '.join(unknown)}; these are: {', '.join(SHRUNK)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(f"{TABLE}\n|---|---|---|---|---|---|---|", flush=True)
    results = []
    for recipe in arguments.recipes or SHRUNK:
        for seed in range(arguments.seeds):
            results.append(run(recipe, seed, arguments.steps, arguments.out, arguments.engine))
            print(row(results[-1]), flush=True)
    (arguments.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    draw(arguments.out / "recipes.png", results)
    return 0 if all(map(learned, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
