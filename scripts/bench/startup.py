"""From the command to the first sampled token: real runs of the tiny model on this machine, and where the time goes.

    .venv/bin/python scripts/bench/startup.py [--runs 5] [--workers 1] [--json startup.json]

Each run is `rlcli train grpo` as a shell starts it, one step long; what was done when it tells itself, in the event
`startup` of its folder. The table has medians over the runs, after one that does not count (it fills the disk's cache).
`rlcli --help` and the light commands are timed beside it.
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
from statistics import median

from _common import median_of, write_json
from rich.console import Console
from rich.table import Table

LIGHT = (
    ["--help"],
    ["train", "--help"],
    ["recipes", "list"],
    ["prep", "list"],
    ["verifiers", "list"],
    ["runs", "list"],
)
RLCLI = [sys.executable, "-m", "rlcli.cli.main"]


def first_token(model: Path, data: Path, out: Path, workers: int) -> dict[str, float]:
    """Seconds until each thing was done."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    words = ["train", "grpo", "--model", str(model), "--data", str(data), "--out", str(out), "--steps", "1"]
    sizes = ["rollout.prompts_per_step=8", "rollout.max_response_tokens=64", "data.max_prompt_tokens=64"]
    words += ["--workers", str(workers), *(word for size in sizes for word in ("--set", size))]
    done = subprocess.run([*RLCLI, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    events = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    found: dict[str, float] = next(event["done_after_s"] for event in events if event["event"] == "startup")
    return found


def light(words: list[str], folder: Path) -> float:
    began = time.perf_counter()
    subprocess.run([*RLCLI, *words], check=True, capture_output=True, cwd=folder)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    console = Console()

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for words in (
            ["tiny-model", "--out", str(folder / "tiny")],
            ["prep", "arithmetic", "--out", str(folder / "sums"), "--count", "256"],
        ):
            subprocess.run([*RLCLI, *words], check=True, capture_output=True)
        runs = [
            first_token(folder / "tiny", folder / "sums", folder / f"run-{number}", options.workers)
            for number in range(options.runs + 1)
        ][1:]
        commands = {" ".join(words): median_of(lambda words=words: light(words, folder)) for words in LIGHT}  # type: ignore[misc]

    medians = {name: median(run[name] for run in runs) for name in runs[0]}
    table = Table("done", "after s", "since the one before, same process")
    last: dict[bool, float] = {}
    for name, after in medians.items():
        worker = name.startswith("worker: ")
        table.add_row(name, f"{after:.2f}", f"{after - last.get(worker, 0.0):.2f}")
        last[worker] = after
    console.print(table)
    beside = Table("command", "s")
    for name, seconds in commands.items():
        beside.add_row(f"rlcli {name}", f"{seconds:.2f}")
    console.print(beside)
    write_json(options.json, {"workers": options.workers, "after_s": medians, "runs": runs, "commands": commands})


if __name__ == "__main__":
    main()
