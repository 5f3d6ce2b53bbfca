"""Check that the verifier accepts each row's own answer: if not, no response to the row could ever be rewarded."""

from __future__ import annotations

import os
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from rlcli.errors import DataError
from rlcli.prep.steps import EXAMPLES, REPORT_EVERY, OnProgress, Rows
from rlcli.prep.steps import Outcome as StepOutcome
from rlcli.prep.stored import Row, StoredRows
from rlcli.scoring.expression import parse
from rlcli.scoring.registry import VERIFIERS
from rlcli.types import Outcome, Verdict

DEADLINE_S = 10.0


def checked(rows: Rows, skip_bad: bool, on_progress: OnProgress) -> StepOutcome:
    """The rows whose verifier accepts the response that its module's `gold` writes for them.

    Rows are kept unchecked if the module has no `gold`, if it runs programs (NEEDS_SANDBOX), and if the verifier is
    code in a file. Raises `DataError` for the first row that fails, unless `skip_bad`; `UnknownName` for an unknown
    verifier.
    """
    golds: dict[str, bool] = {}
    counts: Counter[str] = Counter()
    for row in _all(rows):
        verifier = row.prompt.verifier
        counts[verifier] += 1
        if verifier not in golds:
            golds[verifier] = _has_gold(verifier)
    notes: list[str] = []
    hint, refused = "fix that row of the source", 0
    kept: Rows = {}
    total = sum(counts[verifier] for verifier, has_gold in golds.items() if has_gold)
    with _problems([verifier for verifier, has_gold in golds.items() if has_gold], total, on_progress) as problems:
        for split, some in rows.items():
            places = array("q")
            for place, (row, problem) in enumerate(problems(some)):
                if not problem:
                    places.append(place)
                    continue
                refused += 1
                if len(notes) < EXAMPLES:
                    why = f"the verifier '{row.prompt.verifier}' rejects the row's own answer"
                    notes.append(f"{row.where}: {why} {row.prompt.ground_truth!r:.80}: {problem}")
            kept[split] = some.take(places)
    if refused and not skip_bad:
        more = f" (and {refused - 1} more rows)" if refused > 1 else ""
        raise DataError(notes[0] + more, f"{hint}, leave such rows out with --skip-bad, or use --no-check")
    notes += [
        f"{count} rows of the verifier '{name}' are not checked here" if name else f"{count} rows name no verifier"
        for name, count in counts.items()
        if not golds[name]
    ]
    return StepOutcome(kept, {"answer refused": refused}, notes)


@contextmanager
def _problems(
    verifiers: Sequence[str], total: int, on_progress: OnProgress
) -> Iterator[Callable[[StoredRows], Iterator[tuple[Row, str]]]]:
    """A function that gives each row with why its answer is refused; empty if it is accepted or cannot be checked.
    verifiers: those that can be. total: of their rows. `gold` runs in the scoring processes too: what a row makes of it
    must not hold up the command."""
    from rlcli.scoring.golds import gold_expression
    from rlcli.scoring.processes.pool import ScoringPool, in_order

    if not verifiers:
        yield lambda rows: ((row, "") for row in rows)
        return
    first = {name: parse(name).terms[0] for name in sorted(verifiers)}
    expressions = {name: gold_expression(VERIFIERS.target(term.ref), term) for name, term in first.items()}
    accepted: Future[Verdict] = Future()
    accepted.set_result(Verdict(1.0, Outcome.OK))
    done = 0
    with ScoringPool(len(os.sched_getaffinity(0)), DEADLINE_S, sorted(set(expressions.values()))) as pool:

        def submit(row: Row) -> Future[Verdict]:
            expression = expressions.get(row.prompt.verifier)
            return pool.submit(expression, row.prompt.request()) if expression else accepted

        def problems(rows: StoredRows) -> Iterator[tuple[Row, str]]:
            nonlocal done
            for row, verdict in in_order(rows, submit):
                done += row.prompt.verifier in expressions
                if done % REPORT_EVERY == 0:
                    on_progress("check answers", done, total)
                yield row, _problem(verdict)

        yield problems


def _problem(verdict: Verdict) -> str:
    from rlcli.scoring.golds import STATED

    if verdict.outcome is Outcome.OK:
        return ""
    if verdict.detail.startswith(f"{STATED}: "):
        return verdict.detail.removeprefix(f"{STATED}: ")
    return f"{verdict.outcome}" + (f", {verdict.detail}" if verdict.detail else "")


def _all(rows: Rows) -> Iterator[Row]:
    return (row for some in rows.values() for row in some)


def _has_gold(expression: str) -> bool:
    """Whether the module of the expression's first verifier, which scores the answer, writes responses to check."""
    if not expression:  # it is named when training
        return False
    ref = parse(expression).terms[0].ref
    if ":" in ref:
        return False
    VERIFIERS.get(ref)
    module = sys.modules[VERIFIERS.target(ref).partition(":")[0]]
    return not getattr(module, "NEEDS_SANDBOX", False) and hasattr(module, "gold")
