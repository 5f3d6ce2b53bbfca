"""Throughput of weight syncs: gathering the weights, and loading them into the engine."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from _gpu_check import runs, single_worker
from _gpu_check.check import Check, CheckFailed

REPEATS = 8
FIRST_VERSION = 100
"""First version of the weights, above those of earlier syncs of the same worker."""


def run(check: Check) -> None:
    measure_gathering(check)
    with single_worker.worker(check, check.shape) as worker:
        measure_syncs(check, worker)


def measure_gathering(check: Check) -> None:
    report_path, size = check.work / "sync.json", "1m" if check.rehearse else "500m"
    check.progress("scripts/bench/sync.py: gathering the weights", 30)
    words = ["--sizes", size, "--ranks", "1", "--repeats", "3" if check.rehearse else "7", "--buckets-mb", "32"]
    done = subprocess.run([sys.executable, str(runs.BENCH / "sync.py"), *words, "--json", str(report_path)])
    if done.returncode:
        raise CheckFailed(f"scripts/bench/sync.py ended with exit code {done.returncode}")
    (row,) = json.loads(report_path.read_text())["rows"]
    for method, seconds in row["seconds"].items():
        rate = row["bytes"] / statistics.median(seconds) / 1e9
        check.figure(f"gathering, {method}", rate, "GB/s", note=f"{row['bytes'] / 1e6:.0f} MB on one rank")


def measure_syncs(check: Check, worker: Any) -> None:
    """Sync the weights into the engine of a worker, several times."""
    syncs: list[Any] = []
    for number in range(2 if check.rehearse else REPEATS):
        syncs.append(worker.sync_weights(single_worker.probe(), FIRST_VERSION + number))
        last = syncs[-1]
        check.progress(f"sync {number + 1}: {last.bytes / 1e6:.0f} MB in {1e3 * last.seconds:.0f} ms")
        seconds = statistics.median(sync.seconds for sync in syncs[1:] or syncs)
        check.figure("gathering and loading", last.bytes / seconds / 1e9, "GB/s", ">= 2", f"{1e3 * seconds:.0f} ms")
        checks = statistics.median(sync.check_s for sync in syncs[1:] or syncs)
        check.figure("checking what the engine holds", checks, "s", note="checksums of both sides, in every step")
    worst = max(sync.difference for sync in syncs)
    check.figure("engine against trainer, worst", float(worst), "nats", "<= 0.3")
    check.require(worst < runs.TOLERANCE, "the engine has the trainer's weights after each sync", f"{worst:.4f} nats")
