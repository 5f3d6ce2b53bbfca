"""`rlcli verifiers run`: scores a file of responses."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli import console
from rlcli.cli.options import Deadline, Processes, VerifierName
from rlcli.errors import ConfigError, RunFailed

if TYPE_CHECKING:
    from rlcli.rewards.response_files import Summary

SANDBOXES = "bwrap, landlock, unsafe or auto"

Responses = Annotated[str, typer.Option("--input", help="JSON Lines file of responses (.gz too); -: standard input.")]
ScoredRows = Annotated[
    str | None, typer.Option(help="File for the scored rows (.gz too); -: standard output; unset: no rows.")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave malformed lines out and count them.")]
SandboxChoice = Annotated[str, typer.Option(help=f"Sandbox of verifiers that run programs: {SANDBOXES}.")]
JsonSummary = Annotated[bool, typer.Option("--json", help="Print the summary as JSON on standard output.")]


def run_verifier(
    name: VerifierName,
    source: Responses,
    output: ScoredRows = None,
    skip_bad: SkipBad = False,
    processes: Processes = None,
    deadline: Deadline = 5.0,
    sandbox: SandboxChoice = "",
    as_json: JsonSummary = False,
) -> None:
    """Score responses: each row keeps its fields and gains score, outcome, extracted and seconds.

    A row is {"completion": "…", "ground_truth": "…"} and may have prompt, data_source,
    extra_info, finish_reason ("stop", "length") and thinking (true: the prompt opened a <think>);
    a verifier finds its other fields in extra_info, and a TRL function as columns.

    Examples:

      rlcli verifiers run math --input rows.jsonl --output scored.jsonl

      rlcli verifiers run "math + 0.1 * format" --input rows.jsonl.gz --json

      cat rows.jsonl | rlcli verifiers run gsm8k --input - --output - > scored.jsonl
    """
    from rlcli.rewards.expression import parse
    from rlcli.rewards.response_files import STANDARD, RowFile, Summary, as_fields, verify_rows, writing
    from rlcli.rewards.trial import LOOKED_AT, check_responses
    from rlcli.rewards.verifier_registry import target
    from rlcli.rollout.model_servers.local_servers import scoring_here
    from rlcli.support.sandbox_name import backend_name

    if as_json and output == STANDARD:
        raise ConfigError("--json and --output - both use standard output", "give --output a file")
    if output and STANDARD not in (source, output) and _is_same(Path(source), Path(output)):
        raise ConfigError(f"--output {output} is the file of --input and would replace it", "give it another name")
    backend_name(sandbox)
    composition = parse(name).located()
    for term in composition.terms:
        target(term.ref)  # an unknown name, before a large file is read
    rows = RowFile(source, skip_bad)
    summary = Summary()
    with scoring_here([str(composition)], processes, deadline, sandbox, console.note) as (pool, backend):
        check_responses(
            list(islice(rows, LOOKED_AT)),
            lambda row: f"the one with the ground truth {row.request.ground_truth!r:.80}",
            lambda row: (str(composition), pool.submit(str(composition), row.request)),
        )
        with writing(output) if output else nullcontext() as write, console.progress() as on_progress:
            for row, verdict in verify_rows(str(composition), rows, pool, on_progress):
                summary.add(verdict)
                if write:
                    write(as_fields(row, verdict))
    totals = _as_dict(summary, rows.skipped)
    if as_json:
        arguments = {"verifier": str(composition), "input": source, "output": output, "sandbox": backend or None}
        console.emit_json({**arguments, **totals})
    else:
        _print(totals)
    written = f"; {output} is written" if output else ""
    _report_failures(summary, f"fix the verifier or the rows of {source}{written}")


def _report_failures(summary: Summary, hint: str) -> None:
    """Warn of rows without a verdict. Raises `RunFailed` with this hint if no row has one."""
    from rlcli.types import UNVERIFIED

    failed = " and ".join(
        f"{summary.outcomes[outcome]} {outcome}" for outcome in UNVERIFIED if outcome in summary.outcomes
    )
    if failed and not summary.verified:
        raise RunFailed(f"none of {summary.rows} rows was verified ({failed}): {summary.failures[0]}", hint)
    if failed:
        console.note(f"warning: not verified: {failed}; the first: {summary.failures[0]}")


def _is_same(source: Path, output: Path) -> bool:
    return source.exists() and output.exists() and source.samefile(output)


def _as_dict(summary: Summary, skipped: int) -> dict[str, Any]:
    from rlcli.rewards.latency import Latency
    from rlcli.types import USAGE

    latency = Latency.of(summary.seconds)
    return {
        "rows": summary.rows,
        "skipped": skipped,
        "mean_score": summary.score / summary.verified if summary.verified else None,
        "outcomes": dict(summary.outcomes.most_common()),
        "parts": {
            part: total / count for part, (total, count) in summary.parts.items() if not part.startswith(USAGE)
        },  # those that are logged too
        "usage": {part: total for part, (total, _) in summary.parts.items() if part.startswith(USAGE)},
        "seconds": {"p50": latency.p50, "p90": latency.p90, "p99": latency.p99, "max": latency.max},
    }


def _print(totals: dict[str, Any]) -> None:
    total = totals["rows"]
    rows: list[tuple[str, str]] = [("rows", f"{total:,}")]
    rows += [("skipped lines", f"{totals['skipped']:,}")] if totals["skipped"] else []
    rows += [("mean score", f"{totals['mean_score']:.4f}")] if totals["mean_score"] is not None else []
    rows += [(f"mean of {part}", f"{mean:.4f}") for part, mean in totals["parts"].items()]
    rows += [(name, f"{total:,.10g}") for name, total in totals["usage"].items()]
    rows += [(outcome, f"{count:,} ({count / total:.1%})") for outcome, count in totals["outcomes"].items()]
    rows += [(f"seconds, {name}", f"{seconds:.4f}") for name, seconds in totals["seconds"].items()]
    console.stderr().print(console.table(["measure", "value"], rows))
