"""Tasks of the quickstart over several seeds: does the model learn each time, and how long does it take?

    .venv/bin/python scripts/proofs/quickstart_tasks.py [tools guess shapes words] [--seeds 0 1 2 3 4] [--json FILE]
    .venv/bin/python scripts/proofs/quickstart_tasks.py tools --wrong mask
    .venv/bin/python scripts/proofs/quickstart_tasks.py shapes --wrong images

Runs `rlcli quickstart --task TASK --json` for each seed in a scratch folder with an empty cache, one after another, and
prints a table. Exit code 1 unless greedy success rises within some minutes for each: from below 40% to above 90% in 5
minutes, for `shapes` from below 50% to above 85% in 8, and for `words`, a pretrained model, from below 45% to 80% or
more in 10, with a sampled reward from below 0.1 to 0.75 or more. The model of `words` is downloaded once, to the usual
cache, outside of that time.

--wrong: the same with something wrong on purpose. mask: what the environment wrote is trained as if the policy had
drawn it; nothing is expected. images: each question comes with the image of another one; the success has to stay at
chance. The patches are in this script alone; they reach all processes by a `sitecustomize` on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

EXPECTED = {
    "tools": (0.40, 0.90, 300.0),
    "guess": (0.40, 0.90, 300.0),
    "shapes": (0.50, 0.85, 480.0),
    "words": (0.45, 0.80, 600.0),
}
"""Greedy success before and after, and seconds."""
EXPECTED_REWARD = {"words": (0.10, 0.75)}
"""Sampled reward of the first step, and the mean of the last LAST_STEPS."""
LAST_STEPS = 3
CHANCE, MARGIN = 0.25, 0.06
"""Success rate of a guess among four answers, plus three standard errors of 512 rows."""

WRONG = {}
WRONG["mask"] = '''
from dataclasses import dataclass

import numpy as np

from rlcli.data.trajectories import Span, Trajectory
from rlcli.environments.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Unmasked(Trajectory):
    """Verified as it was drawn, trained as if everything after the prompt had been drawn."""

    right: Trajectory | None = None

    @property
    def last_turn(self):
        return self.right.last_turn


original = Conversation.finished


def finished(self):
    right = original(self)
    start, end = right.prompt_tokens, len(right.tokens)
    log_probs = np.full(end, -1.0, np.float32)
    log_probs[right.response_mask] = right.log_probs
    spans = (Span("prompt", 0, start), Span("policy", start, end, right.versions[-1]))
    return Unmasked(right.tokens, spans, log_probs[start:], right.stop_reason, right)


Conversation.finished = finished
'''
WRONG["images"] = """
import random

from rlcli_data_prep import shapes

original, rng, scenes = shapes.drawn, random.Random(0), []


def drawn(scene, cell):
    scenes.append(scene)
    return original(rng.choice(scenes[-256:]), cell)


shapes.drawn = drawn
"""


def run(task: str, seed: int, folder: Path, wrong: str) -> dict[str, Any]:
    words = ["quickstart", "--task", task, "--seed", str(seed), "--out", f"{folder}/run"]
    words += [] if task == "words" else ["--cache", f"{folder}/cache"]
    environment = dict(os.environ)
    if wrong:
        (folder / "patch").mkdir()
        (folder / "patch" / "sitecustomize.py").write_text(WRONG[wrong])
        paths = [str(folder / "patch"), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    began = time.perf_counter()
    command = [sys.executable, "-P", "-m", "rlcli.cli.main", *words, "--json"]
    result = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
    seconds = time.perf_counter() - began
    first, *_, last = (result["evaluations"][step]["pass"]["pass@1"] for step in sorted(result["evaluations"], key=int))
    return {
        "task": task,
        "seed": seed,
        "wrong": wrong,
        "before": first,
        "after": last,
        "rewards": result["rewards"],
        "warm_start_s": result.get("warm_start_s", 0.0),
        "seconds": seconds,
        "passed": _passed(task, first["mean"], last["mean"], seconds, wrong) and _rewarded(task, result["rewards"]),
    }


def _passed(task: str, first: float, last: float, seconds: float, wrong: str) -> bool:
    if wrong:
        return wrong != "images" or abs(last - CHANCE) <= MARGIN
    highest_start, lowest_end, longest_s = EXPECTED[task]
    return first < highest_start and last >= lowest_end and seconds <= longest_s


def _rewarded(task: str, rewards: list[float]) -> bool:
    highest_start, lowest_end = EXPECTED_REWARD.get(task, (math.inf, -math.inf))
    return rewards[0] < highest_start and fmean(rewards[-LAST_STEPS:]) >= lowest_end


def percent(estimate: dict[str, float]) -> str:
    return f"{100 * estimate['mean']:.1f}% [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=["tools", "guess"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--wrong", choices=sorted(WRONG), default="")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    reward = f"sampled reward, first step → last {LAST_STEPS}"
    print(f"| task | seed | greedy success before | after | {reward} | warm start | in all |")
    print("|---|---|---|---|---|---|---|", flush=True)
    results = []
    if "words" in arguments.tasks:
        from rlcli_quickstart.smollm2 import NAME, real_model

        from rlcli.support.files import cache_folder

        real_model(cache_folder() / NAME)
    for task in arguments.tasks:
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory(prefix="rlcli-tasks-") as folder:
                result = run(task, seed, Path(folder), arguments.wrong)
            results.append(result)
            rewards = f"{result['rewards'][0]:.2f} → {fmean(result['rewards'][-LAST_STEPS:]):.2f}"
            times = f"{result['warm_start_s']:.0f} s | {result['seconds']:.0f} s"
            initial, trained = percent(result["before"]), percent(result["after"])
            print(f"| `{task}` | {seed} | {initial} | {trained} | {rewards} | {times} |", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
