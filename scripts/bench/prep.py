"""Preparing a JSON Lines file of any size: seconds and memory of `rlcli prep jsonl`.

    .venv/bin/python scripts/bench/prep.py [--rows 100000 400000] [--options='--dedup'] [--json prep.json]

Rows are short sums with an answer and two more columns, of about 170 bytes each. Each number of rows is prepared by a
process of its own; memory is the most that was resident in it at once, "a row" what the largest number of rows
takes more than the smallest, by row.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import write_json
from rich.console import Console
from rich.table import Table

MIB = 1 << 20


def make(path: Path, rows: int) -> None:
    """Write a file of so many rows."""
    with path.open("w") as file:
        for i in range(rows):
            question = f"Add the two numbers and give the sum, nothing else. What is {i} + {7 * i % 1009}?"
            row = {"question": question, "answer": i + 7 * i % 1009, "level": i % 5, "id": f"sum-{i:08d}"}
            file.write(json.dumps(row) + "\n")


def prepared(source: Path, out: Path, options: list[str]) -> dict[str, float]:
    """Seconds and bytes of memory of one command."""
    words = ["prep", "jsonl", "--source", str(source), "--columns", "prompt=question", "--out", str(out), *options]
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-P", "-m", "rlcli.cli.main", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, "the command has failed"
    return {"seconds": time.perf_counter() - began, "peak": usage.ru_maxrss << 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 400_000])
    parser.add_argument("--options", default="", help="further options of the command")
    parser.add_argument("--json", default="", help="also write the figures to this file")
    arguments = parser.parse_args()
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="rlcli-bench-") as folder:
        for rows in sorted(arguments.rows):
            source = Path(folder) / "rows.jsonl"
            make(source, rows)
            found[rows] = prepared(source, Path(folder) / "out", shlex.split(arguments.options))
    table = Table("rows", "seconds", "peak MiB")
    for rows, figures in found.items():
        table.add_row(f"{rows:,}", f"{figures['seconds']:.1f}", f"{figures['peak'] / MIB:.0f}")
    console = Console(stderr=True)
    console.print(table)
    least, most = min(found), max(found)
    growth = (found[most]["peak"] - found[least]["peak"]) / (most - least) if most > least else 0.0
    console.print(f"{growth:.0f} bytes a row")
    write_json(arguments.json, {"options": arguments.options, "rows": found, "bytes_a_row": growth})


if __name__ == "__main__":
    main()
