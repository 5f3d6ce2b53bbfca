"""Trains a tiny model for thousands of steps and checks that nothing grows: memory, file descriptors and threads of
every process of the run, Ray's object store, and /dev/shm.

Prints a table; exits with 1 where something grows after the first steps, or the run fails. Ray's own processes are
listed, and not judged. How growth is told from noise: scripts/_soak/growth.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from growth import Limit, Trend, trend
from rich.console import Console
from rich.table import Table
from runs import MODES, Soaked, make_model_and_data, soak, tail

LIMITS = {
    "memory MiB": Limit(rate=3.0, least=6.0),
    "descriptors": Limit(rate=2.0, least=3.0),
    "threads": Limit(rate=2.0, least=3.0),
    "processes": Limit(rate=2.0, least=2.0),
    "objects": Limit(rate=10.0, least=8.0),
    "files": Limit(rate=2.0, least=3.0),
}
"""Growth limits by quantity. Memory in MiB: 3 GiB after a million steps."""
NOT_JUDGED = ("ray: ", "other")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000, help="of each run (3000)")
    parser.add_argument("--warm-up", type=int, default=200, help="steps that do not count (200)")
    parser.add_argument("--mode", nargs="+", choices=list(MODES), default=list(MODES), help="which runs (both)")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints, and evaluations (50)")
    parser.add_argument("--sample-s", type=float, default=1.0, help="seconds between two looks at all processes (1)")
    parser.add_argument("--short", action="store_true", help="160 synchronous steps, of which 40 do not count")
    parser.add_argument("--out", type=Path, help="keep the runs and their logs in this new folder")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    options = parser.parse_args()
    if options.short:
        options.steps, options.warm_up, options.save_every = 160, 40, 20
        options.mode, options.sample_s = ["synchronous"], 0.2
    return options


def main() -> int:
    options = arguments()
    scratch = Path(tempfile.mkdtemp(prefix="rlcli-soak-", dir="/tmp"))
    work = options.out.resolve() if options.out else scratch
    work.mkdir(parents=True, exist_ok=True)
    good, records = True, []
    try:
        make_model_and_data(work)
        for mode in options.mode:
            soaked = soak(mode, options.steps, options.save_every, options.sample_s, work)
            trends = {key: trend(series, options.warm_up, _limit(key)) for key, series in sorted(soaked.series.items())}
            good &= show(soaked, trends, options, work)
            records.append(_record(soaked, trends))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.json:
        report = {"passed": good, "steps": options.steps, "warm_up": options.warm_up, "runs": records}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if good else 1


def show(soaked: Soaked, trends: dict[tuple[str, str], Trend], options: argparse.Namespace, work: Path) -> bool:
    """Print a run's table. Returns whether it ended well and nothing of it grows."""
    table = Table("process", "what", f"after step {options.warm_up}", "at the end", "per 1,000 steps", "", box=None)
    grown, unknown = [], []
    for (who, quantity), fitted in trends.items():
        judged = not who.startswith(NOT_JUDGED)
        if fitted.grows and judged:
            grown.append(f"{who}: {quantity}")
        if not fitted.enough and judged and quantity != "processes":
            unknown.append(f"{who}: {quantity}")
        verdict = "too few values" if not fitted.enough else "GROWS" if fitted.grows else "flat"
        table.add_row(
            who, quantity, f"{fitted.first:.1f}", f"{fitted.last:.1f}", f"{fitted.rate:+.2f}", verdict if judged else ""
        )
    console = Console(width=120, highlight=False)
    console.print(f"{soaked.mode}: {soaked.steps} steps in {soaked.seconds:.0f} s", markup=False)
    console.print(table)
    if soaked.code or not trends:
        console.print(f"the run ended with exit code {soaked.code}:", markup=False)
        console.print(tail(work / soaked.mode.replace(" ", "-")), markup=False, soft_wrap=True)
    for name in grown:
        console.print(f"GROWS: {soaked.mode}: {name}", markup=False)
    for name in unknown:
        console.print(f"not measured: {soaked.mode}: {name} was there for too few steps", markup=False)
    return not grown and soaked.code == 0 and bool(trends)


def _limit(key: tuple[str, str]) -> Limit:
    return LIMITS[key[1]]


def _record(soaked: Soaked, trends: dict[tuple[str, str], Trend]) -> dict[str, Any]:
    rows = [
        {"process": who, "what": quantity, **vars(fitted), "series": soaked.series[who, quantity][:: _thin(soaked)]}
        for (who, quantity), fitted in trends.items()
    ]
    return {"mode": soaked.mode, "code": soaked.code, "steps": soaked.steps, "seconds": soaked.seconds, "rows": rows}


def _thin(soaked: Soaked) -> int:
    """Stride that leaves a few hundred values of a series in the JSON."""
    return max(1, max((len(series) for series in soaked.series.values()), default=0) // 300)


if __name__ == "__main__":
    sys.exit(main())
