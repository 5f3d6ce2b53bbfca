"""`rlcli runs compare`: two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import console
from rlcli.cli.options import JsonObject, MostChanged

if TYPE_CHECKING:
    from rlcli.evaluation.statistics import Estimate
    from rlcli_inspect.report.comparison import RunComparison
    from rlcli_inspect.report.curves import Curve

PARTS = 5
"""Points of each x axis at which the curves are printed; `--json` has all points."""
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

    comparison_result = comparison.compare(find_record(a), find_record(b), changed)
    if as_json:
        console.emit_json(comparison_result.as_dict())
    else:
        _print(comparison_result)


def _print(comparison: RunComparison) -> None:
    for side, run in zip("AB", comparison.runs, strict=True):
        console.plain(_text(f"{side}: {run['name']} ({run['recipe']}, {run['state']}, step {run['step']})"))
    for note in comparison.notes:
        console.plain(_text(f"note: {note}"))
    for curve in comparison.curves:
        if curve.title == "Reward":
            _print_curve(curve, [str(run["name"]) for run in comparison.runs])
    if comparison.evaluations:
        from rlcli.evaluation.statistics import shown_estimate

        rows = [
            (
                pair.steps[0] if len(set(pair.steps)) == 1 else f"{pair.steps[0]} and {pair.steps[1]}",
                pair.metric,
                pair.prompts,
                shown_estimate(pair.metric, pair.a),
                shown_estimate(pair.metric, pair.b),
                _signed(pair.metric, pair.difference),
            )
            for pair in comparison.evaluations
        ]
        console.show(console.table(["after step", "measure", "prompts", "A", "B", "B − A"], rows))
    if comparison.changed:
        changes = [
            (
                prompt.prompt_id,
                f"{prompt.a.pass_rate:.0%} → {prompt.b.pass_rate:.0%}",
                _short(prompt.prompt),
                _short(prompt.a.response),
                _short(prompt.b.response),
            )
            for prompt in comparison.changed
        ]
        console.show(console.table(["most changed", "passed", "prompt", "A's response", "B's response"], changes))
    if comparison.config:
        console.show(console.table(["setting", "A", "B"], _settings(comparison.config)))
    else:
        console.plain("no setting differs")


def _print_curve(curve: Curve, names: Sequence[str]) -> None:
    """Print the values of both runs at some points of the x axis that both have reached."""
    from rlcli_inspect.report.curves import at

    series = {run_series.run: run_series.points for run_series in curve.series}
    if len(series) < 2:
        return
    end = min(points[-1][0] for points in series.values())
    rows = []
    for part in range(1, PARTS + 1):
        values = [at(series[name], end * part / PARTS) for name in names]
        rows.append((f"{end * part / PARTS:,.0f}", *("" if value is None else f"{value:.3f}" for value in values)))
    console.show(console.table([UNITS[curve.x], f"{curve.title.lower()} of A", "of B"], rows))


def _settings(config: Mapping[str, tuple[object, object]]) -> list[tuple[str, str, str]]:
    return [(key, _short("" if a is None else a), _short("" if b is None else b)) for key, (a, b) in config.items()]


def _signed(measure: str, difference: Estimate) -> str:
    """A difference with its interval: of mean scores as it is, of shares in percentage points."""
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
