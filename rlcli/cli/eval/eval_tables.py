"""The tables of `rlcli eval` and `rlcli eval compare`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlcli.cli.console import plain, show, table

if TYPE_CHECKING:
    from rlcli.evaluation.evaluation_report import Category, EvalReport
    from rlcli.evaluation.paired_comparison import DatasetComparison, EvaluationComparison
    from rlcli.launch.evaluation.evaluation_run import Evaluation

PROMPT_CHARACTERS = 60
MOST_ROWS = 30
"""Rows of a table by category; `--json` has all."""


def show_evaluation(evaluation: Evaluation) -> None:
    """Print a table for each dataset, and one for all of them together."""
    from rlcli.evaluation.statistics import shown_estimate

    for name, report in evaluation.reports.items():
        _show_report(f"{evaluation.model} on {evaluation.data[name]}", report)
    if len(evaluation.reports) > 1:
        _show_report(f"{evaluation.model} on all {len(evaluation.reports)} datasets", evaluation.overall)
        averages = [f"{name} {shown_estimate(name, average)}" for name, average in evaluation.averages.items()]
        plain(f"each dataset counting the same: {', '.join(averages)}")


def _show_report(title: str, report: EvalReport) -> None:
    from rlcli.evaluation.statistics import shown_estimate

    lengths = report.lengths
    plain(f"{title}: {_counted(report)}")
    for note in report.notes():
        plain(note)
    rows = [(name, shown_estimate(name, report.measures[name])) for name in _listed(report)]
    rows += [(name, f"{100 * share:.1f}%") for name, share in report.outcomes.items() if share]
    if not math.isnan(lengths.mean):
        spread = f"{lengths.mean:.0f} (mean), {lengths.p50:.0f} (p50), {lengths.p95:.0f} (p95), {lengths.max:.0f} (max)"
        rows.append(("response tokens", spread))
    rows.append(("truncated", f"{100 * lengths.truncated:.1f}%"))
    show(table(["measure", "value"], rows))
    if report.sampled_k:
        inexact = ", ".join(f"maj@{k}" for k in report.sampled_k)
        plain(f"{inexact}: over random subsets of the samples, the same ones every time")
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
            measured = next(iter(categories.values())).measures
            names = ["pass@1", *(["mean@1"] * report.is_graded)]
            names += [name for name in measured if name != "pass@1" and name.startswith(("pass@", "maj@"))]
            cells = [
                [value, category.prompts, *(_measured(category, name) for name in names)]
                for value, category in categories.items()
            ]
            show(table([field, "prompts", *names], cells[:MOST_ROWS]))
            if len(cells) > MOST_ROWS:
                plain(f"and {len(cells) - MOST_ROWS} more; --json shows all")


def _measured(category: Category, name: str) -> str:
    """Empty for a category with fewer samples a prompt than the measure needs."""
    from rlcli.evaluation.statistics import shown_estimate

    return shown_estimate(name, category.measures[name]) if name in category.measures else ""


def _counted(report: EvalReport) -> str:
    """Prompts and samples: `4 prompts × 8`."""
    each, rest = divmod(report.samples, report.prompts)
    return f"{report.prompts} prompts, {report.samples} samples" if rest else f"{report.prompts} prompts × {each}"


def _listed(report: EvalReport) -> list[str]:
    """The measures to show: pass@1, mean@1 and others. mean@k is the same figure as mean@1, for readers of `--json`."""
    others = [name for name in report.measures if name != "pass@1" and not name.startswith("mean@")]
    return ["pass@1", "mean@1", *others]


def show_comparison(compared: EvaluationComparison) -> None:
    """Print the differences by dataset and overall; then the prompts that changed most."""
    from rlcli.evaluation.evaluation_folder import shown

    plain(f"A: {compared.a}")
    plain(f"B: {compared.b}")
    for name, (value_a, value_b) in compared.differing.items():
        plain(f"  {name}: {shown(value_a)} → {shown(value_b)}")
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


def _show_differences(name: str, comparison: DatasetComparison) -> None:
    from rlcli.evaluation.paired_comparison import MEAN

    in_rows = f" in {comparison.rows} rows" if comparison.rows > comparison.prompts else ""
    changes = f"{comparison.better} better, {comparison.worse} worse, {comparison.same} same"
    unmatched = (
        f", {comparison.only_a} only in A, {comparison.only_b} only in B"
        if comparison.only_a or comparison.only_b
        else ""
    )
    plain(f"{name}: {comparison.prompts} prompts{in_rows}: {changes}{unmatched}")
    rows = []
    for measure, values in comparison.measures.items():
        difference, low, high = values.difference.mean, values.difference.low, values.difference.high
        if measure == MEAN:  # of any scores, so not in percent
            cells = (f"{values.a:.3f}", f"{values.b:.3f}", f"{difference:+.3f} [{low:+.3f}, {high:+.3f}]")
        else:
            in_percent = f"{100 * difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
            cells = (_share(values.a), _share(values.b), in_percent)
        rows.append((measure, *cells, f"{values.p:.4f}"))
    show(table(["measure", "A", "B", "B − A", "p"], rows))


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def _shortened(text: str) -> str:
    from rlcli.support.redact import printable

    line = printable(" ".join(text.split()))
    return line if len(line) <= PROMPT_CHARACTERS else line[: PROMPT_CHARACTERS - 1] + "…"
