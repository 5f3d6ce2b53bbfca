"""The plot of the word problems: reward and greedy pass@1 over the minutes of training, compared with TRL's.

    for seed in 0 1 2; do rlcli quickstart --task words --seed $seed --out runs/words-$seed; done
    .venv/bin/python scripts/bench/words_trl.py runs/words-0 --trl-python PYTHON --out trl.json
    .venv/bin/python scripts/bench/words_plot.py runs/words-0 runs/words-1 runs/words-2 --trl trl.json

Minutes are those of steps: start and evaluations are left out, here and there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rlcli.api.run import Run
from rlcli.runs.tracking.plots import running_mean

ROOT = Path(__file__).resolve().parents[2]
OURS, TRL, FAINT = "#2563a8", "#c2410c", 0.25
WINDOW = 3
"""Steps of which a curve shows the mean."""
MOST_BYTES = 150_000


@dataclass(frozen=True)
class Curve:
    """Learning curve of one run."""

    label: str
    """Text of the legend."""
    minutes: list[float]
    """Minutes of training after each step."""
    rewards: list[float]
    """Mean reward of each step."""
    greedy: dict[int, tuple[float, float, float]]
    """Step → pass@1 on held-out problems, with its 95% interval."""

    def minutes_at(self, step: int) -> float:
        return self.minutes[step - 1] if step else 0.0


def curve_of_run(folder: Path) -> Curve:
    run = Run(folder)
    metrics = run.metrics()
    rows = [at for at, step in enumerate(metrics["step"]) if step]
    reports = {step: report["pass"]["pass@1"] for step, report in run.evaluations.items()}
    return Curve(
        "rlcli",
        minutes([metrics["time/step_s"][at] for at in rows]),
        [metrics["reward/mean"][at] for at in rows],
        {step: (report["mean"], report["low"], report["high"]) for step, report in reports.items()},
    )


def curve_of_trl(file: Path) -> Curve:
    result = json.loads(file.read_text())
    return Curve(
        "TRL",
        minutes([step["seconds"] for step in result["steps"]]),
        [step["reward"] for step in result["steps"]],
        {report["step"]: (report["mean"], report["low"], report["high"]) for report in result["evaluations"]},
    )


def minutes(seconds: Sequence[float]) -> list[float]:
    """Minutes after each step.

    >>> minutes([30.0, 90.0])
    [0.5, 2.0]
    """
    return [total / 60 for total in accumulate(seconds)]


def draw(curves: Sequence[Curve], image_path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=110, layout="constrained")
    axes: Any = figure.add_subplot()
    labelled: set[str] = set()
    for curve in curves:
        colour = OURS if curve.label == "rlcli" else TRL
        label = "" if curve.label in labelled else f"{curve.label}: sampled reward, mean of {WINDOW} steps"
        labelled.add(curve.label)
        axes.plot(curve.minutes, curve.rewards, color=colour, alpha=FAINT, linewidth=0.8)
        axes.plot(curve.minutes, running_mean(curve.rewards, WINDOW), color=colour, linewidth=2, label=label or None)
        for step, (mean, low, high) in curve.greedy.items():
            bar = [[mean - low], [high - mean]]
            axes.errorbar(curve.minutes_at(step), mean, bar, color=colour, fmt="o", markersize=5, capsize=3)
    axes.errorbar([], [], [[], []], color="grey", fmt="o", label="greedy pass@1, 256 held-out problems, 95% interval")
    axes.set_xlabel("minutes of training on two CPU cores")
    axes.set_ylim(0.0, 1.0)
    axes.set_xlim(left=-0.3)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(image_path, format="png")
    size = image_path.stat().st_size
    print(f"{image_path}: {size / 1000:.0f} kB")
    assert size < MOST_BYTES, "too large for the documentation"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of our runs")
    parser.add_argument("--trl", type=Path, help="the result of words_trl.py")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img" / "words.png")
    options = parser.parse_args()
    draw([*map(curve_of_run, options.runs), *([curve_of_trl(options.trl)] if options.trl else [])], options.out)


if __name__ == "__main__":
    main()
