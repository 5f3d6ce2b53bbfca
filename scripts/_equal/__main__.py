"""Records what the code computes, or compares it with a record: training runs, verdicts, and resolved recipes.

Training: five recipes, two seeds, one and two workers, ten deterministic steps each: all metrics but clocks and memory,
and the checksum of every tensor of the last checkpoint. Verdicts: of every verifier on every row of the test data.
Recipes: every key of every recipe, resolved. Everything goes through the command line, so that a tree of another
layout can be compared. Numbers are equal bit by bit only on one machine with one set of packages: make the record on
the machine that compares, with --tree for the older code.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare import NEW, differences
from resolved import resolved_recipes
from training import trained
from tree import Tree
from verdicts import verdicts

PARTS: dict[str, Callable[[Tree, Path], dict[str, Any]]] = {
    "recipes": resolved_recipes,
    "verdicts": verdicts,
    "training": trained,
}
MOST_SHOWN = 20
"""Differences of one part that are printed."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/equal", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--record", type=Path, metavar="FILE", help="write what the code computes to this new file")
    task.add_argument("--against", type=Path, metavar="FILE", help="compare with it; exit code 1 where it differs")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts (all)")
    parser.add_argument("--tree", type=Path, help="a checkout with a .venv, in place of this one")
    parser.add_argument("--data", type=Path, help="folder with gsm8k/, math/ and code/ ($RLCLI_SHARED_DATA)")
    parser.add_argument("--out", type=Path, help="keep the runs and verdicts in this new folder")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    began = time.monotonic()
    if options.record and options.record.exists():
        sys.exit(f"scripts/equal: {options.record} exists: name a new one")
    record = json.loads(options.against.read_text()) if options.against else {}
    tree = Tree.at(options.tree, options.data)
    measured, differ = {}, 0
    with tempfile.TemporaryDirectory(prefix="rlcli-equal-") as scratch:
        work = options.out.resolve() if options.out else Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        for part in options.only or PARTS:
            started = time.monotonic()
            measured[part] = PARTS[part](tree, work)
            took = f"{time.monotonic() - started:.0f} s"
            if options.record:
                print(f"{part}: {len(measured[part])} recorded, {took}", flush=True)
                continue
            lines, new = differences(record.get(part, {}), measured[part])
            differ += len(lines)
            # A key or metric that there was none of before changes nothing that was computed then.
            names = (
                f" ({len(new)} new: {', '.join(sorted({line.split(' › ')[-1].removesuffix(NEW) for line in new})[:5])})"
                if new
                else ""
            )
            print(f"{part}: {len(measured[part])} compared, {len(lines)} differences{names}, {took}", flush=True)
            print("".join(f"  {line}\n" for line in lines[:MOST_SHOWN]), end="", flush=True)
    if options.record:
        options.record.write_text(json.dumps(measured, separators=(",", ":")) + "\n")
    print(
        f"{'equal' if not differ else 'not equal'}, {time.monotonic() - began:.0f} s" if options.against else "recorded"
    )
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
