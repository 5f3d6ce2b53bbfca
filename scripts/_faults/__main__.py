"""Plants silent faults in short real runs, one at a time, and shows which check finds each, and at which step.

Each run trains a tiny model, or the one of --model, with Ray, FSDP2 and vLLM on CPUs. A fault is a change to a worker
or to the controller from outside, before the first step. Prints a table; exits with 1 unless each fault is found by its
check within 3 steps, and the runs without a fault raise nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from catalog import FAULTS, LAYOUTS, REAL_FAULTS, REAL_LAYOUTS, SOUND
from model import make_model_and_data, make_quickstart

STEPS = 4
WITHIN = 3
"""Steps in which a fault has to be found."""
UNHARMED = ["grpo", "dapo", "ppo", "rloo", "gspo"]
"""Recipes of the runs without a fault, on the quickstart's task."""
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [fault.name for fault in (*FAULTS, *REAL_FAULTS)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these faults; see --list")
    parser.add_argument("--ci", action="store_true", help="a dozen of them, all with one layout of workers")
    parser.add_argument("--list", action="store_true", help="name all faults, and end")
    parser.add_argument("--unharmed", type=int, metavar="STEPS", help="no fault: five recipes, so many steps each")
    parser.add_argument("--model", type=Path, help="plant others, in runs of this pretrained model; with --data")
    parser.add_argument("--data", type=Path, help="the dataset of --model")
    parser.add_argument("--out", type=Path, help="keep the runs in this new folder")
    parser.add_argument("--json", type=Path, help="write the table to this file, too")
    options = parser.parse_args()
    if (options.model is None) != (options.data is None):
        parser.error("--model and --data belong together")
    return options


def main() -> int:
    options = arguments()
    if options.list:
        for fault in (*FAULTS, *REAL_FAULTS):
            print(f"{fault.name:<24} {fault.description}")
        return 0
    began = time.monotonic()
    work = options.out.resolve() if options.out else Path(tempfile.mkdtemp(prefix="rlcli-faults-", dir="/tmp"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        if options.model:
            (work / "model").symlink_to(options.model.resolve())
            (work / "data").symlink_to(options.data.resolve())
        else:
            (make_quickstart if options.unharmed else make_model_and_data)(work)
        rows = [row for layout, names in _plan(options) for row in _session(work, layout, _steps(options), names)]
    finally:
        if not options.out:
            shutil.rmtree(work, ignore_errors=True)
    good = [_judge(row) for row in rows]
    print(f"\n{sum(good)} of {len(good)} as they should be, {time.monotonic() - began:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(good) and rows else 1


def _steps(options: argparse.Namespace) -> int:
    return options.unharmed or (WITHIN if options.model else STEPS)


def _plan(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Layout → names of the runs in it."""
    if options.unharmed:
        return [(SOUND, [f"unharmed:{recipe}" for recipe in UNHARMED])]
    faults, layouts = (REAL_FAULTS, REAL_LAYOUTS) if options.model else (FAULTS, LAYOUTS)
    selected = [f for f in faults if (f.in_ci if options.ci else options.only is None or f.name in options.only)]
    plan = [(layout, [fault.name for fault in selected if fault.layout == layout]) for layout in layouts]
    return [(layout, ["unharmed:grpo", *names]) for layout, names in plan if names]


def _session(work: Path, layout: str, steps: int, names: list[str]) -> Iterator[Row]:
    """The rows of one layout, each printed as it comes."""
    command = [sys.executable, str(Path(__file__).with_name("session.py")), str(work), layout, str(steps), *names]
    log = work / f"{layout}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        pending = list(names)
        for line in process.stdout:
            row: Row = json.loads(line)
            pending.remove(row["name"])
            _show(row)
            yield row
    if process.wait() or pending:
        tail = log.read_text(errors="replace")[-3000:]
        print(
            f"the session of layout {layout} ended with {process.returncode} before {pending}:\n{tail}", file=sys.stderr
        )
        yield from ({"name": name, "check": "", "step": 0, "stopped": False, "text": "not run"} for name in pending)


def _judge(row: Row) -> bool:
    """True if the run had the expected outcome; prints a message if it did not."""
    expected = {fault.name: fault.check for fault in (*FAULTS, *REAL_FAULTS)}.get(row["name"], "")
    good = row["text"] != "not run" and row["check"] == expected and row["step"] <= WITHIN
    if not good:
        print(
            f"NOT AS IT SHOULD BE: {row['name']}: found by '{row['check']}' at step {row['step']}, not by '{expected}'"
        )
    return bool(good)


def _show(row: Row) -> None:
    description = {fault.name: fault.description for fault in (*FAULTS, *REAL_FAULTS)}.get(row["name"], "no fault")
    detection = (
        f"{row['check']}, step {row['step']}, {'stopped' if row['stopped'] else 'warning'}" if row["check"] else "–"
    )
    print(f"{row['name']:<24} {description:<52} {detection:<40} {row['seconds']:5.1f} s", flush=True)
    print(f"{'':<24} {row['text'][:160]}", flush=True) if row["text"] else None


if __name__ == "__main__":
    sys.exit(main())
