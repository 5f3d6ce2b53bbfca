"""From the command to the first sampled token: real runs of the tiny model on this machine, and where the time goes.

    .venv/bin/python scripts/bench/startup.py [--runs 5] [--workers 1] [--compare] [--json startup.json]

Each run is `rlcli train grpo` as a shell starts it, one step long; what was done when it tells itself, in the event
`startup` of its folder. The table has medians over the runs, after one that does not count (it fills the disk's cache).
`rlcli --help` and the light commands are timed beside it. `--compare` has two more in turn, both without the
supervisor: as it is, and with Ray and the workers started only once all checks are done.
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
LIMIT_S = 300
"""Time limit of one command: a run that hangs ends the benchmark."""
RLCLI = [sys.executable, "-P", "-m", "rlcli.cli.main"]
HERE = "import sys\n{}from rlcli.cli.main import main\nsys.exit(main(sys.argv[1:]))"
"""Without the supervisor, whose child could not be changed."""
LATE = "from rlcli.launch.prewarm import EarlyStart\nEarlyStart.begin = lambda *_: None\n"
WAYS = {
    "command": RLCLI,
    "early": [sys.executable, "-P", "-c", HERE.format("")],
    "late": [sys.executable, "-P", "-c", HERE.format(LATE)],
}


def first_token(variant: str, model: Path, data: Path, run_folder: Path, workers: int) -> dict[str, float]:
    """Seconds until each part of the start-up was done. variant: a key of WAYS."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    words = ["train", "grpo", "--model", str(model), "--data", str(data), "--out", str(run_folder), "--steps", "1"]
    sizes = ["rollout.prompts_per_step=8", "rollout.max_response_tokens=64", "data.max_prompt_tokens=64"]
    words += ["--workers", str(workers), *(word for size in sizes for word in ("--set", size))]
    done = subprocess.run([*WAYS[variant], *words], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    events = map(json.loads, (run_folder / "events.jsonl").read_text().splitlines())
    seconds: dict[str, float] = next(event["done_after_s"] for event in events if event["event"] == "startup")
    return seconds


def light(words: list[str], folder: Path) -> float:
    began = time.perf_counter()
    subprocess.run([*RLCLI, *words], check=True, capture_output=True, cwd=folder, timeout=LIMIT_S)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    console = Console()

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for words in (
            ["tiny-model", "--out", str(folder / "tiny")],
            ["prep", "arithmetic", "--out", str(folder / "sums"), "--count", "256"],
        ):
            subprocess.run([*RLCLI, *words], check=True, capture_output=True, timeout=LIMIT_S)
        ways = list(WAYS) if options.compare else ["command"]
        all_runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in ways}
        for number in range(options.runs + 1):
            for variant in ways:
                startup = first_token(
                    variant, folder / "tiny", folder / "sums", folder / f"{variant}-{number}", options.workers
                )
                if number:
                    all_runs[variant].append(startup)
        commands = {" ".join(words): median_of(lambda words=words: light(words, folder)) for words in LIGHT}  # type: ignore[misc]

    medians = {
        variant: {name: median(run[name] for run in runs) for name in runs[0]} for variant, runs in all_runs.items()
    }
    for variant, after_s in medians.items():
        table = Table("done", "after s", "since the one before, same process", title=variant)
        last: dict[bool, float] = {}
        for name, done_after in after_s.items():
            worker = name.startswith("worker: ")
            table.add_row(name, f"{done_after:.2f}", f"{done_after - last.get(worker, 0.0):.2f}")
            last[worker] = done_after
        console.print(table)
    command_table = Table("command", "s")
    for name, seconds in commands.items():
        command_table.add_row(f"rlcli {name}", f"{seconds:.2f}")
    console.print(command_table)
    write_json(options.json, {"workers": options.workers, "after_s": medians, "runs": all_runs, "commands": commands})


if __name__ == "__main__":
    main()
