"""Shared by the benchmarks of the quickstart's task: runs a command with JSON output; reads and formats its figures."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any


def rlcli(*words: str, log: Path | None = None) -> tuple[dict[str, Any], float]:
    """The parsed output of `rlcli WORDS --json`, and the seconds it took. Raises CalledProcessError where it fails.

    log: file for what it says besides; None: it says it to the terminal.
    """
    started = time.perf_counter()
    command = [sys.executable, "-P", "-m", "rlcli.cli.main", *words, "--json"]
    with log.open("w") if log else nullcontext() as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, check=True)
    return json.loads(done.stdout), time.perf_counter() - started


def evaluations(result: dict[str, Any]) -> dict[int, dict[str, float]]:
    """pass@1 by step, each with `mean`, `low` and `high`, in the order of the steps."""
    by_step = {int(step): report["pass"]["pass@1"] for step, report in result["evaluations"].items()}
    return dict(sorted(by_step.items()))


def percent(estimate: dict[str, float]) -> str:
    return f"{100 * estimate['mean']:.1f}% [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"
