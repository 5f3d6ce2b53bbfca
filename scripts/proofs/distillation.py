"""Does a student learn more from a teacher than from rewards, token by token?

    .venv/bin/python scripts/proofs/distillation.py [--seeds 0 1 …] [--arms opd …] [--steps 16] [--samples 16]
                                                    [--every 2] [--teacher MODEL] [--folder FOLDER] [--json FILE]

On the sums of `rlcli quickstart`. The teacher is a warm start with other random weights than the student's, trained by
GRPO on 256 samples a step for 30 steps, or the run given by --teacher. Each arm trains the same student on as many
samples a step of the same sums: `grpo`, 8 of each prompt, learns from rewards alone; `opd`, `opd_reverse` and
`opd_forward`, 4 of each, from the teacher alone. Every few steps all held-out sums are answered greedily.

Tokens are those that the student has drawn for training. `at equal tokens`: pass@1 after as many tokens as the arm with
the fewest has drawn in all; `tokens to 90%`: until pass@1 reaches 0.9. Both with straight lines between evaluations.
With --folder a run that is finished there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

TARGET, TEACHER_STEPS, OTHER_SEED = 0.9, 30, 1000
COMMON = (
    *("data.max_prompt_tokens=32", "rollout.max_response_tokens=40", "train.tokens_per_microbatch=4096"),
    *("train.lr=2e-4", "train.betas=[0.9,0.99]", "checkpoint.every=0"),
)
TOP = ("algorithm.advantage=one", "teacher.top_k=8")
ARMS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "grpo": ("grpo", 8, ("algorithm.clip_high=0.28",)),
    "opd": ("opd", 4, ()),
    "opd_reverse": ("opd", 4, (*TOP, "algorithm.loss=opd_reverse")),
    "opd_forward": ("opd", 4, (*TOP, "algorithm.loss=opd_forward")),
}
"""Name → recipe, samples of a prompt and `--set` arguments."""
Point = tuple[float, float]
"""Tokens sampled so far, and pass@1."""


def rlcli(*words: object) -> None:
    subprocess.run(
        [sys.executable, "-P", "-m", "rlcli.cli.main", *map(str, words)], stdout=subprocess.DEVNULL, check=True
    )


def train(recipe: str, model: Path, data: Path, run_folder: Path, seed: int, steps: int, sets: Sequence[str]) -> float:
    """Train unless the folder holds a finished run; returns the seconds."""
    done = run_folder / "seconds"
    if not done.exists():
        began = time.perf_counter()
        words = [word for text in (*COMMON, *sets) for word in ("--set", text)]
        where = ("--model", model, "--data", data, "--eval-data", data, "--out", run_folder, "--force", "--seed", seed)
        rlcli("train", recipe, *where, "--steps", steps, *words)
        done.write_text(f"{time.perf_counter() - began:.1f}")
    return float(done.read_text())


def prepared(folder: Path, seed: int, given_teacher: Path | None, teacher_steps: int) -> tuple[Path, Path, Path]:
    """Data, student and teacher of a seed. given_teacher: run of the teacher; None: one is trained."""
    data, student, base = folder / "sums", folder / f"student-{seed}", folder / f"teacher-{seed}-warm"
    if not (data / "test.parquet").exists():
        rlcli("prep", "arithmetic", "--out", data)
    for model, model_seed in ((student, seed), *(((base, OTHER_SEED + seed),) if given_teacher is None else ())):
        if not (model / "model.safetensors").exists():
            rlcli("tiny-model", "--out", model, "--warm", data, "--seed", model_seed)
    if given_teacher is not None:
        return data, student, given_teacher.resolve()
    teacher = folder / f"teacher-{seed}"
    train("grpo", base, data, teacher, OTHER_SEED + seed, teacher_steps, ["algorithm.clip_high=0.28"])
    return data, student, teacher


def curve_of(run: Path, samples: int) -> tuple[list[Point], dict[str, float]]:
    """The points of a run, and its last step's figures of the teacher."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    tokens, points = 0.0, list[Point]()
    for line in lines:
        if line["step"]:
            tokens += samples * line["response_tokens/mean"]
        if "eval/pass@1" in line:
            points.append((tokens, line["eval/pass@1"]))
    names = ("update/teacher_kl", "update/teacher_agreement")
    trained = [line for line in lines if line["step"]]
    ends = {"first": trained[0], "last": trained[-1]}
    return points, {f"{name}/{end}": line[name] for name in names for end, line in ends.items() if name in line}


def value_at(points: list[Point], tokens: float) -> float:
    """pass@1 after so many tokens.

    >>> value_at([(0, 0.1), (100, 0.5)], 50)
    0.3
    """
    for (start, low), (end, high) in pairwise(points):
        if start <= tokens <= end:
            return low + (high - low) * (tokens - start) / (end - start)
    return points[-1][1]


def tokens_to(points: list[Point], target: float) -> float:
    """Tokens until pass@1 reaches `target`; infinity if it does not.

    >>> tokens_to([(0, 0.1), (100, 0.5)], 0.3)
    50.0
    """
    for (start, low), (end, high) in pairwise(points):
        if low < target <= high:
            return start + (end - start) * (target - low) / (high - low)
    return math.inf


def compared(folder: Path, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All arms of a seed."""
    data, student, teacher = prepared(folder, seed, options.teacher, options.teacher_steps)
    of_teacher = curve_of(teacher, 0)[0][-1][1]
    rows = []
    for arm in options.arms:
        recipe, of_prompt, sets = ARMS[arm]
        sizes = (f"rollout.prompts_per_step={options.samples // of_prompt}", f"rollout.samples_per_prompt={of_prompt}")
        sets = (*sets, *sizes, f"evaluation.every={options.every}")
        sets = (*sets, f"teacher.path={teacher}") if recipe == "opd" else sets
        run = folder / f"{arm}-{seed}"
        seconds = train(recipe, student, data, run, seed, options.steps, sets)
        points, extra = curve_of(run, options.samples)
        rows.append({"arm": arm, "seed": seed, "seconds": seconds, "teacher": of_teacher, "curve": points, **extra})
    fewest = min(row["curve"][-1][0] for row in rows)
    for row in rows:
        row["equal_tokens"], row["at_equal_tokens"] = fewest, value_at(row["curve"], fewest)
        reached = tokens_to(row["curve"], TARGET)
        row["tokens_to_target"] = reached if math.isfinite(reached) else None
    return rows


def row(entry: dict[str, Any]) -> str:
    points = entry["curve"]
    reached = "–" if entry["tokens_to_target"] is None else f"{entry['tokens_to_target'] / 1000:.1f}k"
    kl, agree = "–", "–"
    if "update/teacher_kl/first" in entry:
        kl = f"{entry['update/teacher_kl/first']:.3f} → {entry['update/teacher_kl/last']:.3f}"
        agree = f"{entry['update/teacher_agreement/first']:.0%} → {entry['update/teacher_agreement/last']:.0%}"
    scores = f"{points[0][1]:.1%} | {entry['at_equal_tokens']:.1%} | {points[-1][1]:.1%} | {entry['teacher']:.1%}"
    return (
        f"| `{entry['arm']}` | {entry['seed']} | {scores} | {points[-1][0] / 1000:.1f}k | {reached} | {kl} | {agree} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16, help="a step; a multiple of 8")
    parser.add_argument("--every", type=int, default=2, help="steps between evaluations")
    parser.add_argument("--teacher", type=Path, default=None, help="a run on the same sums")
    parser.add_argument("--teacher-steps", type=int, default=TEACHER_STEPS)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    print("| arm | seed | before | at equal tokens | after | teacher | tokens | to 90% | KL to teacher | agreement |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rlcli-distillation-") as scratch:
        for seed in options.seeds:
            folder = (options.folder or Path(scratch)).resolve()
            results += compared(folder, seed, options)
            print("\n".join(row(figures) for figures in results if figures["seed"] == seed), flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
