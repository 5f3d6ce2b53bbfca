"""`rlcli verifiers audit`: tests whether a verifier judges correctly."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import completion, console
from rlcli.cli.options import Deadline, JsonReport, Processes, Sandbox
from rlcli.errors import ConfigError

if TYPE_CHECKING:
    from rlcli.rewards.expression import Composition
    from rlcli_audit.audit_report import Report, Tally, UnexpectedVerdict
    from rlcli_audit.judge_audit import JudgeReport
    from rlcli_audit.verifier_audit import Options

MAX_PRINTED = 20
"""Maximum number of unexpected verdicts that are printed."""
MAX_PRINTED_OF_KIND = 3
"""The same for each kind of probe."""
LINE_CHARS = 100


def audit_verifier(
    name: Annotated[str, typer.Argument(help="Name, file.py:function, expression, or auto: what each row names.")],
    data: Annotated[
        Path,
        typer.Option(
            help="A parquet file, or a folder with train.parquet or test.parquet.", autocompletion=completion.datasets
        ),
    ],
    limit: Annotated[int, typer.Option(min=0, help="The first N rows only; 0: all.")] = 0,
    mutations: Annotated[int, typer.Option(min=0, help="Mutations tried per row; 0: all.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed for choosing each row's mutations.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the full report as one HTML file.")] = None,
    processes: Processes = None,
    deadline: Deadline = 5.0,
    sandbox: Sandbox = "",
    as_json: JsonReport = False,
) -> None:
    """Test a verifier on a dataset's right answers and on mutations of them, and report whether it passes.

    Right answers must score 1, in other forms too; wrong ones, retracted ones
    and known exploits must not. Exit code 1: a right answer is refused, a wrong
    one or an exploit is accepted or crashes the verifier, or verdicts change
    on a second try. Refused equivalents and accepted hedges are warnings,
    which --strict turns into failures.

    A judge is audited otherwise: its agreement with labels, what padding
    changes, and whether a response can talk it into a score. --data may then
    be JSON Lines with a field label (true, false); without --limit, 50 rows.

    Examples:

      rlcli verifiers audit math --data data/math --html audit.html

      rlcli verifiers audit auto --data data/gsm8k/test.parquet --limit 500

      rlcli verifiers audit path/to/file.py:function --data data/gsm8k --strict --json
    """
    from rlcli.rewards.expression import parse
    from rlcli_audit.judge_audit import is_judge
    from rlcli_audit.verifier_audit import Options, audit

    options = Options(limit, seed, mutations, processes or len(os.sched_getaffinity(0)), deadline, sandbox, strict)
    if is_judge(composition := parse(name).located(), options):
        return _audit_judge(composition, data, options, html, as_json)
    with console.progress() as on_progress:
        report = audit(name, data, options, on_progress)
    if as_json:
        console.emit_json(report.as_dict())
    else:
        _print(report)
    if html:  # last: a file that cannot be written must not lose the report
        from rlcli_audit.audit_page import write_page

        write_page(html, report)
    if not report.passed:
        raise typer.Exit(1)


def _audit_judge(composition: Composition, data: Path, options: Options, html: Path | None, as_json: bool) -> None:
    from rlcli.rollout.model_servers.local_servers import serving_here
    from rlcli_audit.judge_audit import audit_judge

    if html:
        raise ConfigError("--html: the audit of a judge makes no page", "give --json")
    with serving_here([str(composition)], console.note), console.progress() as on_progress:
        report = audit_judge(composition, data, options, on_progress, console.note)
    if as_json:
        console.emit_json(report.as_dict())
    else:
        _print_judge(report)
    if report.faults:
        raise typer.Exit(1)


def _print_judge(report: JudgeReport) -> None:
    from rlcli.support.redact import printable

    console.plain(f"audit of {report.verifier} on {report.data}: {report.rows:,} rows in {report.seconds:.1f} s")
    verdict = f"FAIL: {'; '.join(report.faults)}" if report.faults else "PASS"
    console.plain(verdict)
    rows = [
        (
            kind.name,
            "accept" if kind.expected else "refuse",
            kind.tried,
            f"{kind.share:.1%}" if kind.judged else "",
            f"{kind.mean:.2f}" if kind.judged else "",
            kind.unverified,
        )
        for kind in report.kinds.values()
    ]
    console.show(console.table(["response", "should", "tried", "as expected", "mean score", "no verdict"], rows))
    for kind in report.kinds.values():
        for example in kind.examples[:1]:
            console.plain(f"{kind.name}: {printable(example)}".replace("\n", " "))
    for name, total in report.usage.items():
        console.plain(f"{name}: {total:,.10g}")
    order = f", pairs decided by their order {report.flips:.1%}" if report.flips == report.flips else ""
    if report.agreement == report.agreement:
        console.plain(
            f"agreement with the labels {report.agreement:.1%}, change by padding {report.length_shift:+.2f}{order}"
        )
    console.plain(verdict)  # again: the first may have scrolled away


def _print(report: Report) -> None:
    of_all = f" of {report.rows_in_file:,}" if report.rows < report.rows_in_file else ""
    console.plain(
        f"audit of {report.verifier} on {report.data}: {report.rows:,}{of_all} rows, {report.verifications:,} "
        f"verifications in {report.seconds:.1f} s ({report.per_second:,.0f}/s)"
    )
    noted = f" (warnings: {len(report.warnings)})" if report.warnings else ""
    verdict = f"PASS{noted}" if report.passed else f"FAIL: {'; '.join(report.faults)}"
    console.plain(verdict)
    _print_tallies(report.tallies)
    if report.surprises:
        _print_surprises(report.surprises)
    latency = report.latency
    console.plain(
        f"\nlatency: p50 {_ms(latency.p50)}, p90 {_ms(latency.p90)}, p99 {_ms(latency.p99)}, max {_ms(latency.max)}\n"
        f"determinism: {report.determinism.checked} verified again, {len(report.determinism.differing)} differ"
    )
    for line in [*(f"note: {note}" for note in report.notes), *(f"warning: {warning}" for warning in report.warnings)]:
        console.plain(line)
    console.plain(verdict)  # again: the first may have scrolled away


def _print_tallies(tallies: tuple[Tally, ...]) -> None:
    """Print a table by kind, under the name of each group."""
    from rlcli_audit.audit_report import percent

    width = max(len(tally.kind) for tally in tallies) + 4
    console.plain(f"\n{'':{width}}{'tried':>9}{'as expected':>13}{'share':>9}")
    group = None
    for tally in tallies:
        if tally.group is not group:
            group = tally.group
            console.plain(f"{group}: {group.rule}")
        failed = f"  {tally.failed:,} crashed or timed out" if tally.failed else ""
        share = percent(tally.as_expected, tally.tried)
        line = f"  {tally.kind:{width - 2}}{tally.tried:>9,}{tally.as_expected:>13,}{share:>9}"
        console.plain(line + failed)


def _print_surprises(surprises: tuple[UnexpectedVerdict, ...]) -> None:
    from rlcli.images.image_descriptions import in_words
    from rlcli.support.redact import printable

    grave_first = sorted(surprises, key=lambda surprise: not surprise.group.grave)
    of_kind: Counter[str] = Counter()
    shown: list[UnexpectedVerdict] = []
    for surprise in grave_first:
        of_kind[surprise.kind] += 1
        if of_kind[surprise.kind] <= MAX_PRINTED_OF_KIND and len(shown) < MAX_PRINTED:
            shown.append(surprise)
    console.plain("\nnot as expected:")
    for surprise in shown:
        verdict = printable(
            f"{surprise.score:g} {surprise.outcome} {surprise.extracted or ''}".strip()[:LINE_CHARS]
        ).replace("\n", " ")
        truth = printable(surprise.ground_truth[:LINE_CHARS]).replace("\n", "⏎")
        ending = printable(surprise.response_end[-LINE_CHARS:]).replace("\n", "⏎")
        row = " ".join([f"row {surprise.row}", *map(in_words, surprise.images)])
        console.plain(f"  {row}, {surprise.group}, {surprise.kind}: {verdict}")
        console.plain(f"    truth {truth}, response …{ending}")
        if surprise.detail:
            console.plain(f"    {printable(surprise.detail[: 2 * LINE_CHARS])}".replace("\n", " "))
    if len(surprises) > len(shown):
        console.plain(f"and {len(surprises) - len(shown):,} more, in --json")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
