"""The tables of `rlcli eval` and `rlcli eval compare`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlcli.cli.console import plain, show, table

if TYPE_CHECKING:
    from rlcli.evaluation.compare import Compared, Comparison
    from rlcli.evaluation.report import EvalReport
    from rlcli.launch.evaluation.run import Evaluation

PROMPT_CHARACTERS = 60
MOST_ROWS = 30
"""Rows of a table by category; `--json` has all."""


def show_evaluation(evaluation: Evaluation) -> None:
    """Print a table for each dataset, and one for all of them together."""
    for name, report in evaluation.reports.items():
        _show_report(f"{evaluation.model} on {evaluation.data[name]}", report)
    if len(evaluation.reports) > 1:
        _show_report(f"{evaluation.model} on all {len(evaluation.reports)} datasets", evaluation.overall)
        plain(f"pass@1, each dataset counting the same: {evaluation.average}")


def _show_report(title: str, report: EvalReport) -> None:
    lengths = report.lengths
    plain(f"{title}: {report.prompts} prompts × {report.samples // report.prompts}")
    rows = [(name, str(estimate)) for name, estimate in report.measures.items()]
    rows += [(name, f"{100 * share:.1f}%") for name, share in report.outcomes.items() if share]
    if not math.isnan(lengths.mean):
        spread = f"{lengths.mean:.0f} (mean), {lengths.p50:.0f} (p50), {lengths.p95:.0f} (p95), {lengths.max:.0f} (max)"
        rows.append(("response tokens", spread))
    rows.append(("truncated", f"{100 * lengths.truncated:.1f}%"))
    show(table(["measure", "value"], rows))
    if report.sampled_k:
        named = ", ".join(f"maj@{k}" for k in report.sampled_k)
        plain(f"{named}: over random subsets of the samples, the same ones every time")
    if report.unverified:
        plain(
            f"{report.unverified} of {report.samples} responses could not be verified (timeout, crash, unparsed) and "
            "count as not passed"
        )
    if report.crash:
        plain(f"the first crash of a verifier: «{report.crash}»")
    for field, categories in report.categories.items():
        if len(categories) > 1 or field not in ("data_source", "ability"):
            # The others do not fit in a terminal; --json has them.
            names = [name for name in next(iter(categories.values())).measures if name.startswith(("pass@", "maj@"))]
            cells = [
                [value, category.prompts, *(str(category.measures[name]) for name in names)]
                for value, category in categories.items()
            ]
            show(table([field, "prompts", *names], cells[:MOST_ROWS]))
            if len(cells) > MOST_ROWS:
                plain(f"and {len(cells) - MOST_ROWS} more; --json shows all")


def show_comparison(compared: Compared) -> None:
    """Print the differences by dataset and overall; then the prompts that changed most."""
    from rlcli.evaluation.store import shown

    plain(f"A: {compared.a}")
    plain(f"B: {compared.b}")
    for name, (one, other) in compared.differing.items():
        plain(f"  {name}: {shown(one)} → {shown(other)}")
    if compared.unmatched:
        plain(f"left out, found in only one of them: {', '.join(compared.unmatched)}")
    for name, comparison in compared.datasets.items():
        _show_differences(name, comparison)
    if len(compared.datasets) > 1:
        _show_differences(f"all {len(compared.datasets)} datasets", compared.overall)
    changed = compared.overall.changed
    if changed:
        rows = [(c.prompt_id, _share(c.a), _share(c.b), _shortened(c.prompt)) for c in changed]
        show(table(["most changed", "A", "B", "prompt"], rows))


def _show_differences(name: str, found: Comparison) -> None:
    unmatched = f", {found.only_a} only in A, {found.only_b} only in B" if found.only_a or found.only_b else ""
    plain(f"{name}: {found.prompts} prompts: {found.better} better, {found.worse} worse, {found.same} same{unmatched}")
    rows = []
    for measure, one in found.measures.items():
        low, high = (f"{100 * end:+.1f}" for end in (one.difference.low, one.difference.high))
        rows.append(
            (measure, _share(one.a), _share(one.b), f"{100 * one.difference.mean:+.1f} [{low}, {high}]", f"{one.p:.4f}")
        )
    show(table(["measure", "A", "B", "B − A", "p"], rows))


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def _shortened(text: str) -> str:
    from rlcli.redact import printable

    line = printable(" ".join(text.split()))
    return line if len(line) <= PROMPT_CHARACTERS else line[: PROMPT_CHARACTERS - 1] + "…"
