"""Checks that correct runs pass the log-prob check, with each dtype, in the workers and with engines one step behind.

    python scripts/proofs/log_prob_check.py [--model FOLDER --data FOLDER] [--steps N] [--only NAME…] [--json FILE]
    python scripts/proofs/log_prob_check.py --ci        # one case of the tiny model

Trains 8 prompts × 4 samples a step and prints, for each case, the largest statistic of all steps as a share of its
bound (`margin`), every warning, and what sync and step take. Exit code 1 if a run fails, or raises a warning that is
not in EXPECTED. Without --model, a tiny model that it makes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlcli.runs.folder import events_of
from rlcli.runs.record_files import metrics_of

COMMAND = [sys.executable, "-P", "-m", "rlcli.cli.main"]
PROMPTS, SAMPLES = 8, 4
DEDICATED = ("rollout.workers=1", "async.staleness=1")
CASES = {
    "bfloat16": ("model.dtype=bfloat16",),
    "float32": ("model.dtype=float32",),
    "float16": ("model.dtype=float16",),
    "bfloat16-dedicated": ("model.dtype=bfloat16", *DEDICATED),
    "float32-dedicated": ("model.dtype=float32", *DEDICATED),
    "bfloat16-lora": ("model.dtype=bfloat16", "lora.rank=8"),
}
"""Name → settings. On CPUs float16 is slow: it gets STEPS_FLOAT16 steps at most."""
STEPS_FLOAT16 = 10
SETTINGS = (
    *(f"rollout.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}"),
    *("rollout.max_response_tokens=32", "rollout.log_prob_check=warn", "train.lr=1e-5"),
    *("train.tokens_per_microbatch=2048", "checkpoint.every=0", "evaluation.data=", "tracking.trackers="),
    # A letter that about half of the responses have: their groups differ, and are trained on.
    'verifier.name=regex(pattern="[jkvw]", match=search)',
)
EXPECTED = {"truncated_rewarded", "hacking_length"}
"""Warnings that are true of these runs: that verifier rewards long responses, and those that are cut off."""


@dataclass(frozen=True)
class Row:
    """One run."""

    name: str
    """Name of the case."""
    exit: int
    """Exit status of its command."""
    steps: int
    """Steps completed."""
    tokens: float
    """Median of the steps' tokens that were compared."""
    mean_abs_diff: float
    """Mean over the steps of the mean absolute log-prob difference."""
    max_abs_diff: float
    """Largest absolute log-prob difference."""
    margin: float
    """Largest statistic ÷ bound of all steps."""
    at_step: int
    """The step of `margin`."""
    warnings: tuple[str, ...]
    """Names of all that the run raised."""
    sync_s: float
    """Median weight-sync seconds per step."""
    step_s: float
    """Median step seconds."""

    @property
    def sound(self) -> bool:
        return self.exit == 0 and self.steps > 0 and not {*self.warnings} - EXPECTED and self.margin <= 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--folder", type=Path, help="where the runs are kept")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ci", action="store_true")
    options = parser.parse_args()
    if (options.model is None) != (options.data is None):
        parser.error("--model and --data belong together")
    names, steps = (["bfloat16"], 3) if options.ci else (options.only or list(CASES), options.steps)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model, data = (options.model, options.data) if options.model else tiny(folder)
        for name in names:
            rows.append(trained(name, model, data, folder, min(steps, STEPS_FLOAT16) if name == "float16" else steps))
            print(f"{name}: {'sound' if rows[-1].sound else 'NOT SOUND'}", flush=True)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return int(not all(row.sound for row in rows))


def tiny(folder: Path) -> tuple[Path, Path]:
    model, data = folder / "tiny", folder / "sums"
    subprocess.run([*COMMAND, "tiny-model", "--out", str(model)], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*COMMAND, "prep", "arithmetic", "--out", str(data)], check=True, stdout=subprocess.DEVNULL)
    return model, data


def trained(name: str, model: Path, data: Path, folder: Path, steps: int) -> Row:
    """The row of one case."""
    run = folder / name
    words = ["train", "grpo", "--model", str(model), "--data", str(data), "--out", str(run), "--steps", str(steps)]
    sets = [word for setting in (*SETTINGS, *CASES[name]) for word in ("--set", setting)]
    with (folder / f"{name}.log").open("w") as log:
        done = subprocess.run(
            [*COMMAND, *words, "--workers", "1", "--force", *sets], stdout=log, stderr=log, check=False
        )
    lines: list[dict[str, Any]] = [line for line in metrics_of(run) if line["step"]] if run.exists() else []
    if not lines:
        return Row(name, done.returncode, 0, 0.0, 0.0, 0.0, 0.0, 0, (), 0.0, 0.0)
    worst = max(lines, key=lambda line: float(line["log_prob_check/margin"]))
    warnings = tuple(sorted({str(e["name"]) for e in events_of(run) if e["event"] == "warning"}))
    return Row(
        name,
        done.returncode,
        len(lines),
        statistics.median(line["log_prob_check/tokens"] for line in lines),
        statistics.fmean(line["log_prob_check/mean_abs_diff"] for line in lines),
        max(line["log_prob_check/max_abs_diff"] for line in lines),
        worst["log_prob_check/margin"],
        worst["step"],
        warnings,
        statistics.median(line["time/sync_s"] for line in lines),
        statistics.median(line["time/step_s"] for line in lines),
    )


def show(rows: list[Row]) -> None:
    table = Table("run", "steps", "tokens a step", "mean |Δ|", "max |Δ|", "margin", "warnings", "sync, s", "step, s")
    for row in rows:
        table.add_row(
            row.name,
            str(row.steps) if not row.exit else f"{row.steps}, exit {row.exit}",
            f"{row.tokens:.0f}",
            f"{row.mean_abs_diff:.2g}",
            f"{row.max_abs_diff:.2g}",
            f"{row.margin:.2f} (step {row.at_step})",
            ", ".join(row.warnings) or "none",
            f"{row.sync_s:.2f}",
            f"{row.step_s:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
