"""Checks that a run loses nothing when its inference servers are killed.

    python scripts/proofs/servers.py [--folder FOLDER] [--json FILE] [--ci]

Trains the tiny model with two vLLM servers that the run starts. One is killed while it generates, one in the middle of
a weight sync. The run is interrupted two steps after both are replaced. Exit code 1 if a response is lost or counted
twice, an engine differs from the trainer, or a killed server is not replaced. --ci: only the first kill.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import rlcli
from rlcli.rollout.servers.server_record import states

PROMPTS, SAMPLES = 4, 16
COMMAND = [sys.executable, "-P", "-m", "rlcli.cli.main"]
MOST_STEPS = 1000
VERIFIER = '''"""Short responses: random weights earn this too, so that the weights change at every step."""

from rlcli.types import Outcome, Verdict, VerifyRequest


def verify(request: VerifyRequest) -> Verdict:
    return Verdict(score=1 / (1 + len(request.completion)), outcome=Outcome.OK)
'''
LOOK_S = 0.002
STEP_S = 600.0
"""Longest time that is waited for something to happen in the run."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where model, data and run are kept")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ci", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        rows = proven(options.folder or Path(temporary), sync=not options.ci)
    table = Table("what", "wanted", "found", "")
    for name, wanted, observed in rows:
        table.add_row(name, str(wanted), str(observed), "" if wanted == observed else "differs")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps([dict(zip(("what", "wanted", "found"), row, strict=True)) for row in rows]))
    return int(any(wanted != observed for _, wanted, observed in rows))


def proven(folder: Path, *, sync: bool) -> list[tuple[str, Any, Any]]:
    """Expected and observed values of one run."""
    folder.mkdir(parents=True, exist_ok=True)
    model, data, run = folder / "tiny", folder / "sums", folder / "run"
    if not model.exists():
        subprocess.run([*COMMAND, "tiny-model", "--out", str(model)], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*COMMAND, "prep", "arithmetic", "--out", str(data)], check=True, stdout=subprocess.DEVNULL)
    verifier = folder / "reward.py"
    verifier.write_text(VERIFIER)
    settings = {
        "verifier.name": f"{verifier}:verify",
        "train.lr": 1e-5,  # or the policy learns all there is, and its weights stop changing
        "rollout.engine": "server",
        "rollout.servers": 2,
        "rollout.workers": 1,
        "rollout.prompts_per_step": PROMPTS,
        "rollout.samples_per_prompt": SAMPLES,
        "rollout.max_response_tokens": 192,
        "rollout.max_concurrent": 16,
        "data.max_prompt_tokens": 32,
        "train.tokens_per_microbatch": 2048,
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words = ["train", "grpo", "--model", str(model), "--data", str(data), "--out", str(run), "--steps", str(MOST_STEPS)]
    with (folder / "run.log").open("w") as log:
        process = subprocess.Popen([*COMMAND, *words, "--force", *sets], stdout=log, stderr=log)
        try:
            kills = [killed_while_generating(run, process)]
            if sync:
                kills.append(killed_in_sync(run, process))
            last = done(run) + 2
            wait_for(process, lambda: done(run) >= last)
            process.send_signal(signal.SIGINT)
            status = process.wait()
        finally:
            process.terminate()
    return [("exit status", 130, status), *(check for kill in kills for check in kill), *found_in(run, len(kills))]


def killed_while_generating(run: Path, process: subprocess.Popen[bytes]) -> list[tuple[str, Any, Any]]:
    wait_for(process, lambda: servers(run) and done(run) >= 1)
    wait_for(process, lambda: servers(run)[0]["running"] > 0)
    running = servers(run)[0]["running"]
    os.killpg(servers(run)[0]["pid"], signal.SIGKILL)
    return [("server 0 generated when it was killed", True, running > 0), *replaced(run, process, 0)]


def killed_in_sync(run: Path, process: subprocess.Popen[bytes]) -> list[tuple[str, Any, Any]]:
    """The weights of a sync are in a new folder, next to the servers' sockets, before any server loads them."""
    folder = Path(servers(run)[1]["server"].removeprefix("unix:")).parent
    initial_files, pid = set(folder.glob("weights-*")), servers(run)[1]["pid"]
    wait_for(process, lambda: set(folder.glob("weights-*")) - initial_files)
    os.killpg(pid, signal.SIGKILL)
    wait_for(process, lambda: servers(run)[1]["lost"] > 0)
    old = servers(run)[1]["weights"] < state(run)["weights"]
    return [("server 1 was killed before it had the new weights", True, old), *replaced(run, process, 1)]


def replaced(run: Path, process: subprocess.Popen[bytes], number: int) -> list[tuple[str, Any, Any]]:
    """Wait until the server is ready again, with the weights of the others."""
    wait_for(process, lambda: servers(run)[number]["lost"] > 0)
    wait_for(process, lambda: servers(run)[number]["state"] == "ready")
    return [(f"state of server {number} after it", "ready", servers(run)[number]["state"])]


def found_in(run: Path, kills: int) -> list[tuple[str, Any, Any]]:
    record = rlcli.Run(run)
    steps = record.step
    metrics = record.metrics()
    lost = [event for event in record.events if event["event"] == "engine lost"]
    counts = Counter[int]()
    for step in range(1, steps + 1):
        samples = record.samples(step)
        counts[step] = len(set(zip(samples["group"], samples["sample"], strict=True)))
        if len(samples["group"]) != counts[step]:
            counts[step] = -1
    moved = sum(value or 0 for value in metrics["engine/moved"])
    return [
        (f"steps of {steps} with metrics", steps, len(metrics["step"])),
        ("different responses in each step", [PROMPTS * SAMPLES], sorted(set(counts.values()))),
        (
            "servers lost, in events and metrics",
            (kills, kills),
            (len(lost), sum(v or 0 for v in metrics["engine/lost"])),
        ),
        ("responses were moved to the other server", True, moved > 0),
        (
            "largest |log-prob difference| of engine and trainer < 1e-3",
            True,
            max(metrics["log_prob_check/max_abs_diff"]) < 1e-3,
        ),
        ("steps that changed the weights", steps, sum(bool(value) for value in metrics["sync/changed_tensors"])),
        ("tensors that could not be compared", 0, sum(value or 0 for value in metrics["sync/unchecked_tensors"])),
    ]


def state(run: Path) -> dict[str, Any]:
    (run_state,) = states(run)
    return run_state


def servers(run: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = state(run)["servers"]
    except rlcli.RlcliError:
        return []
    return rows


def done(run: Path) -> int:
    lines = run / "metrics.jsonl"
    return len(lines.read_text().splitlines()) if lines.exists() else 0


def wait_for(process: subprocess.Popen[bytes], holds: Callable[[], Any]) -> None:
    until = time.monotonic() + STEP_S
    while not holds():
        if process.poll() is not None:
            sys.exit(f"the run ended too early, with exit status {process.returncode}")
        if time.monotonic() > until:
            process.terminate()
            sys.exit(f"it did not happen in {STEP_S:g} s")
        time.sleep(LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
