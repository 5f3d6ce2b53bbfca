"""Secrets of the environment, in a real run whose own code prints and raises all that it sees."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from commands import ENVIRONMENT, RLCLI, SOON

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

PLANTED = {
    "HF_TOKEN": "hf_plantedhubtoken0123456789",
    "WANDB_API_KEY": "plantedwandbkey0123456789abcdef01234567",
    "OPENAI_API_KEY": "sk-plantedendpointkey0123456789",
    "MLFLOW_TRACKING_URI": "http://planted-user:planted-password@127.0.0.1:9",
    "WANDB_MODE": "offline",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}
SECRETS = ("plantedhub", "plantedwandb", "plantedendpoint", "planted-password")
LEAKS = """
import logging, os, sys, traceback
seen = " ".join(os.environ.values())
print("mine.py printed", seen, flush=True)
print("mine.py printed", seen, file=sys.stderr, flush=True)
logging.getLogger("mine").error("mine.py logged %s", seen)
try:
    raise ValueError("mine.py raised " + seen)
except ValueError:
    traceback.print_exc()
{function}
"""
VERIFY = """
def verify(request):
    from rlcli.types import Outcome, Verdict
    print("verify printed", " ".join(os.environ.values()), flush=True)
    return Verdict(float(len(request.completion) % 2), Outcome.OK)
"""


def test_no_secret_reaches_a_folder_an_output_or_a_command_line(tiny: Path, sums: Path, tmp_path: Path) -> None:
    (tmp_path / "algorithm.py").write_text(LEAKS.format(function=""))
    (tmp_path / "verifier.py").write_text(LEAKS.format(function=VERIFY))
    run_folder = tmp_path / "run"
    words = ["--debug", "train", "grpo", "--model", tiny, "--data", sums, "--out", run_folder, "--steps", "2", *SOON]
    words += ["--verifier", f"{tmp_path}/verifier.py:verify", "--set", f"algorithm.code={tmp_path}/algorithm.py"]
    words += ["--set", 'tracking.trackers=["wandb","mlflow"]', "--workers", "1"]
    process = subprocess.Popen(
        [*RLCLI, *map(str, words)],
        env=os.environ | ENVIRONMENT | PLANTED,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process, watching() as lines:
        output = process.communicate(timeout=500)[0]
    assert process.returncode == 0, output
    assert any("rlcli.runs.tracking.tracker_main" in line for line in lines)
    assert any("rlcli.rewards.service.scoring_service" in line for line in lines)
    assert len(lines) > 8, "Ray's processes, the workers, what verifies and the trackers"
    assert not [line for line in lines if any(secret in line for secret in SECRETS)]
    assert not [secret for secret in SECRETS if secret in output]
    written = {str(path.relative_to(run_folder)): path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    assert not [(name, secret) for name, content in written.items() for secret in SECRETS if secret.encode() in content]
    logs = b"".join(content for name, content in written.items() if name.startswith("logs/"))
    for channel in (b"printed", b"logged", b"raised"):
        assert b"mine.py " + channel in written["logs/rank-0.log"], "of algorithm.code"
    assert b"mine.py printed" in b"".join(content for name, content in written.items() if "verifiers-" in name)
    assert b"verify printed" in logs
    assert b"***" in logs


@contextlib.contextmanager
def watching() -> Iterator[set[str]]:
    """The command lines of all processes below this one, as they come."""
    lines, ended = set[str](), threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    lines.add(" ".join(process.cmdline()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lines
    finally:
        ended.set()
        thread.join()
