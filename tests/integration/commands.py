"""`rlcli` as a command, and its processes."""

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
"""The same without importing vLLM, for tests that do not depend on the engine."""

Cli = Callable[..., subprocess.CompletedProcess[str]]
STARTED: list[subprocess.Popen[str]] = []
"""Processes started by the current test."""


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


def spawned(file: str, model: Path, output_path: Path, *arguments: str, timeout: float = 500) -> dict[str, Any]:
    """Run `file` with these arguments in a worker's environment, and read the JSON that it writes to `output_path`."""
    from rlcli.cluster.placement import WORKER_ENV

    completed = subprocess.run(
        [sys.executable, file, str(model), str(output_path), *arguments],
        env=os.environ | ENVIRONMENT | WORKER_ENV,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert output_path.exists(), completed.stderr[-3000:]
    result: dict[str, Any] = json.loads(output_path.read_text())
    return result


def end_started() -> None:
    """Kill the processes that the current test has started and not ended, and their descendants."""
    for process in STARTED:
        if process.poll() is None:
            family = descendants(process.pid)
            process.kill()
            for child in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
    STARTED.clear()


def processes_of(*marks: str) -> list[str]:
    """Command lines of live processes that hold one of `marks`."""
    lines = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if any(mark in line for mark in marks) and process.info["status"] != psutil.STATUS_ZOMBIE:
            lines.append(f"{process.info['pid']}: {line}")
    return lines


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
