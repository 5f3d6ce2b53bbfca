"""How fast weights reach the engine: gathering them, and the whole way into its parameters."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from _gpu_check import alone, runs
from _gpu_check.check import Check, CheckFailed

REPEATS = 8


def run(check: Check) -> None:
    gathered(check)
    loaded(check)


def gathered(check: Check) -> None:
    out, size = check.work / "sync.json", "1m" if check.rehearse else "500m"
    check.progress("scripts/bench/sync.py: gathering the weights", 30)
    words = ["--sizes", size, "--ranks", "1", "--repeats", "3" if check.rehearse else "7", "--buckets-mb", "32"]
    done = subprocess.run([sys.executable, str(runs.BENCH / "sync.py"), *words, "--json", str(out)])
    if done.returncode:
        raise CheckFailed(f"scripts/bench/sync.py ended with exit code {done.returncode}")
    (row,) = json.loads(out.read_text())["rows"]
    for how, seconds in row["seconds"].items():
        rate = row["bytes"] / statistics.median(seconds) / 1e9
        check.figure(f"gathering, {how}", rate, "GB/s", note=f"{row['bytes'] / 1e6:.0f} MB on one rank")


def loaded(check: Check) -> None:
    with alone.worker(check, "0.5b") as worker:
        found: list[Any] = []
        for number in range(2 if check.rehearse else REPEATS):
            found.append(worker.sync_weights(alone.probe(), number + 1))
            one = found[-1]
            check.progress(f"sync {number + 1}: {one.bytes / 1e6:.0f} MB in {1e3 * one.seconds:.0f} ms")
            seconds = statistics.median(each.seconds for each in found[1:] or found)
            check.figure("gathering and loading", one.bytes / seconds / 1e9, "GB/s", ">= 2", f"{1e3 * seconds:.0f} ms")
    worst = max(each.difference for each in found)
    check.figure("engine against trainer, worst", float(worst), "nats", "<= 0.3")
    check.require(worst < runs.TOLERANCE, "the engine has the trainer's weights after each sync", f"{worst:.4f} nats")
