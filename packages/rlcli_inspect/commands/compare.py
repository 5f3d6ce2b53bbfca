"""`rlcli runs compare`: two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli import console
from rlcli.cli.options import JsonObject, MostChanged

if TYPE_CHECKING:
    from rlcli.evaluation.statistics import Estimate
    from rlcli_inspect.report.comparison import Comparison
    from rlcli_inspect.report.curves import Curve

PARTS = 5
"""Places on each x axis at which the curves are printed; `--json` has all."""
CELL = 48
"""Characters of a prompt, of a response and of a value."""
UNITS = {"step": "steps", "tokens": "generated tokens", "seconds": "seconds"}


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run's folder, or its name below runs/.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    changed: MostChanged = 10,
    as_json: JsonObject = False,
) -> None:
    """Compare two runs: curves, evaluations paired by prompt, prompts that changed most, and configuration.

    Curves are compared at equal steps, equal numbers of generated tokens and equal seconds.

    Examples:

      rlcli runs compare grpo-1 dapo-1

      rlcli runs compare runs/grpo-1 runs/grpo-2 --changed 3 --json
    """
    from rlcli.launch.resume import find_record
    from rlcli_inspect.report import comparison

    found = comparison.compare(find_record(a), find_record(b), changed)
    if as_json:
        console.emit_json(found.as_dict())
    else:
        _print(found)


def _print(found: Comparison) -> None:
    for side, run in zip("AB", found.runs, strict=True):
        console.plain(_text(f"{side}: {run['name']} ({run['recipe']}, {run['state']}, step {run['step']})"))
    for note in found.notes:
        console.plain(_text(f"note: {note}"))
    for curve in found.curves:
        if curve.title == "Reward":
            _print_curve(curve, [str(run["name"]) for run in found.runs])
    if found.evaluations:
        from rlcli.evaluation.statistics import shown_estimate

        rows = [
            (
                one.steps[0] if len(set(one.steps)) == 1 else f"{one.steps[0]} and {one.steps[1]}",
                *(one.metric, one.prompts, shown_estimate(one.metric, one.a), shown_estimate(one.metric, one.b)),
                _signed(one.metric, one.difference),
            )
            for one in found.evaluations
        ]
        console.show(console.table(["after step", "measure", "prompts", "A", "B", "B − A"], rows))
    if found.changed:
        changes = [
            (one.prompt_id, f"{one.a.pass_rate:.0%} → {one.b.pass_rate:.0%}", *map(_short, texts))
            for one in found.changed
            for texts in [(one.prompt, one.a.response, one.b.response)]
        ]
        console.show(console.table(["most changed", "passed", "prompt", "A's response", "B's response"], changes))
    if found.config:
        console.show(console.table(["setting", "A", "B"], _settings(found.config)))
    else:
        console.plain("no setting differs")


def _print_curve(curve: Curve, names: Sequence[str]) -> None:
    """The values of both runs at some places of the x axis that both have reached."""
    from rlcli_inspect.report.curves import at

    series = {one.run: one.points for one in curve.series}
    if len(series) < 2:
        return
    end = min(points[-1][0] for points in series.values())
    rows = []
    for part in range(1, PARTS + 1):
        values = [at(series[name], end * part / PARTS) for name in names]
        rows.append((f"{end * part / PARTS:,.0f}", *("" if value is None else f"{value:.3f}" for value in values)))
    console.show(console.table([UNITS[curve.x], f"{curve.title.lower()} of A", "of B"], rows))


def _settings(config: Mapping[str, tuple[Any, Any]]) -> list[tuple[str, str, str]]:
    return [(key, _short("" if a is None else a), _short("" if b is None else b)) for key, (a, b) in config.items()]


def _signed(measure: str, difference: Estimate) -> str:
    """Of a mean score as it is, else in percentage points."""
    if measure.startswith("mean@"):
        return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
    low, high = 100 * difference.low, 100 * difference.high
    return f"{100 * difference.mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _text(text: str) -> str:
    from rlcli.support.redact import printable

    return printable(text)


def _short(value: object) -> str:
    line = _text(" ".join(str(value).split()))
    return line if len(line) <= CELL else line[: CELL - 1] + "…"
