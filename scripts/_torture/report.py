"""The table at the end."""

from __future__ import annotations

from harm import Blow, Tortured
from rich.console import Console
from rich.table import Table

COLUMNS = ("run", "kind", "moment", "victim", "outcome", "samples lost", "bitwise equal", "orphans", "leftovers")


def show(results: list[Tortured], leftovers: list[str]) -> bool:
    """Print the outcome of each run, and the violated guarantees. leftovers: entries of /tmp and /dev/shm that did not
    before. Returns True if no guarantee was violated."""
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for result in results:
        for index, blow in enumerate(result.blows):
            table.add_row(
                *([result.name.removeprefix("run-"), result.plan.kind.name] if index == 0 else ["", ""]),
                *_row(blow, result),
            )
    console = Console(width=200, highlight=False)
    console.print(table)
    problems = [problem for result in results for problem in problems_of(result)]
    problems += [f"left behind: {entry}" for entry in leftovers]
    for problem in problems:
        console.print(f"NOT AS PROMISED: {problem}", markup=False, soft_wrap=True)
    return not problems


def problems_of(result: Tortured) -> list[str]:
    name = result.name
    lines = [f"{name}: {problem}" for problem in result.problems]
    if result.lost:
        lines.append(f"{name}: {result.lost} samples lost")
    lines += [f"{name}: {difference}" for difference in (result.differences or [])[:5]]
    lines += [f"{name}: left in TMPDIR: {entry}" for entry in result.leftovers]
    return lines


def _row(blow: Blow, result: Tortured) -> list[str]:
    """Cells of a blow; samples, equality, orphans and leftovers are those of its run."""
    outcome = blow.outcome
    if blow.resumed_from is not None:
        outcome += f" from step {blow.resumed_from} in {blow.seconds:g} s"
    equal = "?" if result.differences is None else "no" if result.differences else "yes"
    lost = "?" if result.lost is None else str(result.lost)
    moment = f"step {blow.step}, {blow.phase}"
    return [moment, blow.victim, outcome, lost, equal, str(len(blow.orphans)), str(len(result.leftovers))]
