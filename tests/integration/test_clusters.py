"""The Slurm script of scripts/clusters on two Ray nodes of one machine, with stand-ins for Slurm's programs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT, SOON, end_started

SCRIPTS = Path(__file__).parents[2] / "scripts" / "clusters"
SCONTROL = """#!/usr/bin/env bash
case "$1" in
  show) printf 'one\\ntwo\\n' ;;
  requeue) echo "$2" >> "$STATE/requeued" ;;
esac
"""
SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
if [ "$1" = hostname ]; then echo 127.0.0.1 fe80::1; exit; fi
[[ " $* " == *" --head "* ]] && set -- "$@" --include-dashboard=false --temp-dir="$STATE/ray"
exec "$@" --num-cpus=1 --object-store-memory=100000000
"""
"""Two nodes on one machine, with a CPU each. Slurm would send no signal to a step; this process is the step."""


def job(state: Path, *words: str | Path) -> subprocess.Popen[str]:
    """The script as Slurm runs it."""
    programs = state / "bin"
    programs.mkdir(exist_ok=True)
    rlcli = f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} -m rlcli.cli.main "$@"\n'
    ray = f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} -m ray.scripts.scripts "$@"\n'
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "rlcli": rlcli, "ray": ray}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    slurm = {"SLURM_JOB_NODELIST": "two machines", "SLURM_JOB_ID": "17", "STATE": str(state), "RAY_PORT": str(port)}
    path = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", SCRIPTS / "slurm.sbatch", *map(str, words)],
        env=os.environ | ENVIRONMENT | slurm | path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def state() -> Any:
    """A folder with a short name: sockets are in it."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    yield folder
    end_started()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.exhaustive  # runs on several nodes, signals and resumption have tests of their own
@pytest.mark.timeout(1200)
def test_a_slurm_job_that_is_told_to_stop_is_queued_again_and_goes_on(tiny: Path, sums: Path, state: Path) -> None:
    run_folder = state / "run"
    words = ["grpo", "--model", tiny, "--data", sums, "--workers", "2", "--out", run_folder, *SOON]
    words += ["--set", "verifier.name=test-even", "--set", "checkpoint.every=0"]

    def steps() -> list[int]:
        lines = (
            (run_folder / "metrics.jsonl").read_text().splitlines() if (run_folder / "metrics.jsonl").exists() else []
        )
        return [json.loads(line)["step"] for line in lines]

    first = job(state, *words, "--steps", "1000")
    try:
        until = time.monotonic() + 400
        while not [step for step in steps() if step] and time.monotonic() < until and first.poll() is None:
            time.sleep(0.2)
        os.kill(first.pid, signal.SIGTERM)  # Slurm: to the batch script alone
        output = first.communicate(timeout=300)[0]
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
    assert first.returncode == 130, output
    assert (state / "requeued").read_text() == "17\n"
    done = max(steps())
    requeued = job(state, *words, "--steps", str(done + 1))
    try:
        output = requeued.communicate(timeout=400)[0]
    finally:
        if requeued.poll() is None:
            os.killpg(requeued.pid, signal.SIGKILL)
    assert requeued.returncode == 0, output
    assert f"resuming from step-{done:06d}" in output
    assert max(steps()) == done + 1
    assert (state / "requeued").read_text() == "17\n", "a job that has ended is not queued again"
