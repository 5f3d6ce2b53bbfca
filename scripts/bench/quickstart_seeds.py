"""The quickstart over several seeds: is the improvement there each time, and how long does it take?

    .venv/bin/python scripts/bench/quickstart_seeds.py [--seeds 5] [--out seeds.json]

Runs `rlcli quickstart --json` for each seed in a scratch folder with an empty cache, one after another; prints a table
and exits with 1 unless every seed improves by at least 30 points with disjoint 95% intervals within 5 minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from _quickstart import evaluations, percent, rlcli

POINTS, SECONDS = 0.30, 300.0


def run(seed: int, folder: Path) -> dict[str, Any]:
    folders = ("--out", str(folder / "run"), "--cache", str(folder / "cache"))
    result, seconds = rlcli("quickstart", "--seed", str(seed), *folders)
    initial, *_, trained = evaluations(result).values()
    return {
        "seed": seed,
        "before": initial,
        "after": trained,
        "seconds": seconds,
        "warm_start_s": result["warm_start_s"],
        "reward_first": result["reward_first"],
        "reward_last": result["reward_last"],
        "passed": trained["mean"] - initial["mean"] >= POINTS
        and initial["high"] < trained["low"]
        and seconds <= SECONDS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    print("| seed | pass@1 before | pass@1 after | sampled reward, first → last step | warm start | in all |")
    print("|---|---|---|---|---|---|", flush=True)
    results = []
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory(prefix="rlcli-seeds-") as folder:
            row = run(seed, Path(folder))
        results.append(row)
        rewards = f"{row['reward_first']:.2f} → {row['reward_last']:.2f}"
        times = f"{row['warm_start_s']:.0f} s | {row['seconds']:.0f} s"
        print(f"| {seed} | {percent(row['before'])} | {percent(row['after'])} | {rewards} | {times} |", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if all(row["passed"] for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
