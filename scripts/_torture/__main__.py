"""Kills processes of short runs at random moments and proves that nothing was lost.

Each run gets several blows, one after another: kill -9 of its driver, its supervisor, a worker (and the vLLM engine in
it), a scoring process, the fork server that starts those, the scoring service, Ray's head or raylet, or a whole machine
of a cluster. In the end it has to equal, bit by bit, a run that nobody touched. Prints a table; exits with 1 unless all
is as promised.
"""

from __future__ import annotations

import argparse
import json
import shutil
import string
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

from aims import RECIPES, STEPS, Kind, Plan, draw
from cluster import Cluster
from equal import differences, lost_samples
from harm import Tortured, torture
from leftovers import below, left_since, seen
from report import show
from runs import Run, Stuck

AT_ONCE = 2
"""Runs side by side: while one waits, the other computes."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/torture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="how many, over all runs (20)")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (0)")
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--workers", type=int, choices=[1, 2], help="of every run (both, one mostly)")
    parser.add_argument("--no-cluster", action="store_true", help="no run on a cluster whose machines are killed")
    parser.add_argument("--minutes", type=float, help="stop after so many (5, and one for each kill)")
    parser.add_argument("--out", type=Path, help="keep the runs and their logs in this new folder")
    parser.add_argument("--json", type=Path, help="write what happened to this file")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    began = time.monotonic()
    plans = draw(
        options.kills,
        options.seed,
        options.recipe,
        [options.workers] if options.workers else [1, 2],
        cluster=not options.no_cluster,
    )
    scratch = Path(tempfile.mkdtemp(prefix="rlcli-torture-", dir="/tmp"))  # short: sockets lie in it
    work = options.out.resolve() if options.out else scratch / "runs"
    work.mkdir(parents=True)
    initial_entries = seen()
    try:
        make_model_and_data(work)
        results = carry_out(plans, work, scratch, minutes=options.minutes or 5.0 + options.kills)
    finally:
        leftovers = left_since(initial_entries)
        shutil.rmtree(scratch, ignore_errors=True)
    location = f"; the runs are in {work}" if options.out else ""
    good = show(results, leftovers)
    print(
        f"{sum(len(r.blows) for r in results)} kills, seed {options.seed}, {time.monotonic() - began:.0f} s{location}"
    )
    if options.json:
        report = {"seed": options.seed, "passed": good, "leftovers": leftovers, "runs": [asdict(r) for r in results]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if good else 1


def make_model_and_data(work: Path) -> None:
    from rlcli.data.prompts.parquet_schema import write_prompts
    from rlcli.model.io.tiny_model import make_tiny_model
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.types import ConvertOptions

    make_tiny_model(work / "model")
    for split, prompts in prepare(converter_named("arithmetic"), ConvertOptions(count=64, test_count=8)).splits.items():
        write_prompts(work / "data" / f"{split}.parquet", prompts)


def carry_out(plans: list[Plan], work: Path, scratch: Path, minutes: float) -> list[Tortured]:
    """Reference runs, then the plans, two at a time. Past `minutes` no further run begins, and those that run are
    ended."""
    runs: list[Run] = []
    over = threading.Event()

    def begin(kind: Kind, name: str, cluster: Mapping[str, str] = MappingProxyType({})) -> Run:
        if over.is_set():
            raise Stuck(f"not begun: {minutes:g} minutes are over")
        runs.append(Run(kind, work / name, work, scratch / name, cluster))
        return runs[-1]

    def stop() -> None:
        over.set()
        for run in runs:
            run.end()

    clock = threading.Timer(60 * minutes, stop)
    clock.start()
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            kinds = sorted({plan.kind.reference for plan in plans}, key=lambda kind: (kind.workers, kind.recipe))
            references = dict(zip(kinds, pool.map(lambda kind: reference(kind, begin), kinds), strict=True))
            done = pool.map(lambda plan: all_of(plan, references[plan.kind.reference], begin, scratch), plans)
            return [result for results in done for result in results]
    finally:
        clock.cancel()
        stop()


def reference(kind: Kind, begin: Callable[..., Run]) -> Path:
    """The folder of a run that nobody touches."""
    run = begin(kind, f"reference-{kind.recipe}-{kind.workers}")
    run.start()
    try:
        run.until(run.ended, "its end")
    except Stuck as stuck:
        raise SystemExit(str(stuck)) from None
    if run.code() != 0:
        raise SystemExit(f"the uninterrupted run {run.out.name} fails: {run.error_line()}")
    run.end()
    print(f"reference: {kind.name}, {STEPS} steps", file=sys.stderr, flush=True)
    return run.out


def all_of(plan: Plan, reference: Path, begin: Callable[..., Run], scratch: Path) -> list[Tortured]:
    """Carry out a plan: by one run, and by further ones for the aims that it was too fast for."""
    results: list[Tortured] = []
    for suffix in ("", *string.ascii_lowercase):
        results.append(one(plan, f"run-{plan.number:02d}{suffix}", reference, begin, scratch))
        last = results[-1]
        outcomes = ", ".join(f"{blow.victim} {blow.outcome}" for blow in last.blows)
        print(f"{last.name}: {plan.kind.name}: {outcomes} ({last.seconds:.0f} s)", file=sys.stderr, flush=True)
        if last.problems or not last.missed:
            break
        if not last.blows:
            last.problems.append("it ended before the first blow")
            break
        plan = replace(plan, aims=last.missed)
    return results


def one(plan: Plan, name: str, reference: Path, begin: Callable[..., Run], scratch: Path) -> Tortured:
    """Torture one run and compare the outcome with the reference."""
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(Cluster(scratch / f"c{name[4:]}")) if plan.kind.cluster else None
            run = begin(plan.kind, name, cluster.environment if cluster else {})
        except (Stuck, OSError) as error:
            return Tortured(plan, name, problems=[str(error)])
        result = torture(plan, run, cluster)
    try:
        result.lost = lost_samples(run.out, reference)
        result.differences = differences(run.out, reference)
    except Exception as error:
        result.problems.append(f"it cannot be compared: {type(error).__name__}: {error}")
    result.leftovers = below(run.scratch)
    return result


if __name__ == "__main__":
    sys.exit(main())
