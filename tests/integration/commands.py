"""`rlcli` as a command, and what became of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "PYTHONPATH": str(Path(__file__).parent / "plugin"),
}
RLCLI = [sys.executable, "-m", "rlcli.cli.main"]
SMALL = [
    *("--set", "rollout.prompts_per_step=4", "--set", "rollout.samples_per_prompt=4"),
    *("--set", "rollout.max_response_tokens=24", "--set", "data.max_prompt_tokens=32"),
    *("--set", "train.tokens_per_microbatch=256", "--set", "train.lr=1e-3"),
]
"""A step of 16 short samples in several micro-batches."""
SOON = [*SMALL, "--set", "rollout.engine=transformers"]
"""The same, without the import of vLLM: for what does not depend on the engine."""

Cli = Callable[..., subprocess.CompletedProcess[str]]
STARTED: list[subprocess.Popen[str]] = []
"""By the current test."""


def start(*words: str | Path) -> subprocess.Popen[str]:
    """`rlcli WORDS` in a session of its own, so that a signal to it is a signal to nothing else."""
    process = subprocess.Popen(
        [*RLCLI, *map(str, words)],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    STARTED.append(process)
    return process


def spawned(file: str, model: Path, out: Path, *more: str, timeout: float = 500) -> dict[str, Any]:
    """What `file`, run with these arguments in a worker's environment, writes to `out` as JSON."""
    from rlcli.cluster.placement import WORKER_ENV

    done = subprocess.run(
        [sys.executable, file, str(model), str(out), *more],
        env=os.environ | ENVIRONMENT | WORKER_ENV,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert out.exists(), done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def end_started() -> None:
    """End what the current test has started and not ended, with what belongs to it."""
    for process in STARTED:
        if process.poll() is None:
            family = descendants(process.pid)
            process.kill()
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
    STARTED.clear()


def processes_of(*marks: str) -> list[str]:
    """Command lines of live processes that hold one of `marks`."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if any(mark in line for mark in marks) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(f"{process.info['pid']}: {line}")
    return found


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
