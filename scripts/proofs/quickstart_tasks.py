"""The conversations of the quickstart over several seeds: does the model learn each time, and how long does it take?

    .venv/bin/python scripts/proofs/quickstart_tasks.py [tools guess] [--seeds 0 1 2 3 4] [--wrong-mask] [--json FILE]

Runs `rlcli quickstart --task TASK --json` for each seed in a scratch folder with an empty cache, one after another, and
prints a table. Exit code 1 unless greedy success rises from below 40% to above 90% within 5 minutes for each.

--wrong-mask: the same with the mask wrong on purpose: what the environment wrote is trained as if the policy had drawn
it. The patch is in this script alone; it reaches the workers by a `sitecustomize` on PYTHONPATH. Nothing is expected.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BEFORE, AFTER, SECONDS = 0.40, 0.90, 300.0

WRONG_MASK = '''
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
    log_probs[right.drawn] = right.log_probs
    spans = (Span("prompt", 0, start), Span("policy", start, end, right.versions[-1]))
    return Unmasked(right.tokens, spans, log_probs[start:], right.stop_reason, right)


Conversation.finished = finished
'''


def run(task: str, seed: int, folder: Path, wrong_mask: bool) -> dict[str, Any]:
    words = ["quickstart", "--task", task, "--seed", str(seed), "--out", f"{folder}/run", "--cache", f"{folder}/cache"]
    environment = dict(os.environ)
    if wrong_mask:
        (folder / "patch").mkdir()
        (folder / "patch" / "sitecustomize.py").write_text(WRONG_MASK)
        paths = [str(folder / "patch"), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    began = time.perf_counter()
    command = [sys.executable, "-m", "rlcli.cli.main", *words, "--json"]
    result = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
    seconds = time.perf_counter() - began
    first, *_, last = (result["evaluations"][step]["pass"]["pass@1"] for step in sorted(result["evaluations"], key=int))
    return {
        "task": task,
        "seed": seed,
        "wrong_mask": wrong_mask,
        "before": first,
        "after": last,
        "rewards": result["rewards"],
        "warm_start_s": result["warm_start_s"],
        "seconds": seconds,
        "passed": first["mean"] < BEFORE and last["mean"] > AFTER and seconds <= SECONDS,
    }


def percent(estimate: dict[str, float]) -> str:
    return f"{100 * estimate['mean']:.1f}% [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=["tools", "guess"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--wrong-mask", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    print("| task | seed | greedy success before | after | sampled reward, first → last step | warm start | in all |")
    print("|---|---|---|---|---|---|---|", flush=True)
    results = []
    for task in arguments.tasks:
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory(prefix="rlcli-tasks-") as folder:
                one = run(task, seed, Path(folder), arguments.wrong_mask)
            results.append(one)
            rewards = f"{one['rewards'][0]:.2f} → {one['rewards'][-1]:.2f}"
            times = f"{one['warm_start_s']:.0f} s | {one['seconds']:.0f} s"
            line = f"| `{task}` | {seed} | {percent(one['before'])} | {percent(one['after'])} | {rewards} | {times} |"
            print(line, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if arguments.wrong_mask or all(one["passed"] for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
