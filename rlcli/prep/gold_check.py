"""Checks that the verifier accepts each row's own answer: if not, no response to the row could ever be rewarded.

If a row has no answer to try, as with tests of code, its module's `check_row` reads the row without running it.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from types import ModuleType

from rlcli.errors import DataError
from rlcli.prep.row_steps import EXAMPLES, REPORT_EVERY, OnProgress, Rows
from rlcli.prep.row_steps import Outcome as StepOutcome
from rlcli.prep.row_store import Row, StoredRows
from rlcli.rewards.expression import parse
from rlcli.rewards.verifier_registry import VERIFIERS
from rlcli.types import Outcome, Verdict

DEADLINE_S = 10.0


def checked(rows: Rows, skip_bad: bool, on_progress: OnProgress) -> StepOutcome:
    """The rows whose verifier accepts the response that its module's `gold` writes for them, or can read them, if it
    has `check_row`.

    Rows are kept unchecked if the module has neither, if it runs programs (NEEDS_SANDBOX) and has no `check_row`, and
    if the verifier is code in a file. Raises `DataError` for the first row that fails, unless `skip_bad`; `UnknownName`
    for an unknown verifier.
    """
    checks: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for row in _all(rows):
        verifier = row.prompt.verifier
        counts[verifier] += 1
        if verifier not in checks:
            checks[verifier] = _check_of(verifier)
    expressions = {verifier: check for verifier, check in checks.items() if check}
    notes: list[str] = []
    hint, refused = "fix that row of the source", 0
    accepted: Rows = {}
    total = sum(counts[verifier] for verifier in expressions)
    with _problems(expressions, total, on_progress) as problems:
        for split, split_rows in rows.items():
            indexes = array("q")
            for index, (row, problem) in enumerate(problems(split_rows)):
                if not problem:
                    indexes.append(index)
                    continue
                refused += 1
                if len(notes) < EXAMPLES:
                    fails = "cannot read" if _reads_rows(row.prompt.verifier) else "rejects the row's own answer"
                    why = f"the verifier '{row.prompt.verifier}' {fails}"
                    notes.append(f"{row.where}: {why} {row.prompt.ground_truth!r:.80}: {problem}")
            accepted[split] = split_rows.take(indexes)
    if refused and not skip_bad:
        others = f" (and {refused - 1} more rows)" if refused > 1 else ""
        raise DataError(notes[0] + others, f"{hint}, leave such rows out with --skip-bad, or use --no-check")
    notes += [
        f"{count} rows of the verifier '{name}' are not checked here" if name else f"{count} rows name no verifier"
        for name, count in counts.items()
        if not checks[name]
    ]
    return StepOutcome(accepted, {"answer refused": refused}, notes)


@contextmanager
def _problems(
    expressions: Mapping[str, str], total: int, on_progress: OnProgress
) -> Iterator[Callable[[StoredRows], Iterator[tuple[Row, str]]]]:
    """A function that yields each row with the reason why its answer is refused, empty if it is accepted or cannot be
    checked. expressions: verifier → expression that checks its rows. total: number of these rows. `gold` and
    `check_row` run in the scoring processes too, so that no row can block the command."""
    from rlcli.rewards.processes.scoring_pool import ScoringPool, in_order

    if not expressions:
        yield lambda rows: ((row, "") for row in rows)
        return
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
    from rlcli.rewards.gold_verifiers import STATED

    if verdict.outcome is Outcome.OK:
        return ""
    if verdict.detail.startswith(f"{STATED}: "):
        return verdict.detail.removeprefix(f"{STATED}: ")
    return f"{verdict.outcome}" + (f", {verdict.detail}" if verdict.detail else "")


def _all(rows: Rows) -> Iterator[Row]:
    return (row for split_rows in rows.values() for row in split_rows)


def _check_of(verifier: str) -> str:
    """The expression that checks the rows of a verifier, by the module of its first term, which scores the answer;
    empty if they cannot be checked."""
    from rlcli.rewards.gold_verifiers import gold_expression, row_expression

    module = _module_of(verifier)
    if module is None:
        return ""
    term = parse(verifier).terms[0]
    target = VERIFIERS.target(term.ref)
    if hasattr(module, "check_row"):
        return row_expression(target)
    has_gold = not getattr(module, "NEEDS_SANDBOX", False) and hasattr(module, "gold")
    return gold_expression(target, term) if has_gold else ""


def _reads_rows(verifier: str) -> bool:
    return hasattr(_module_of(verifier), "check_row")


def _module_of(verifier: str) -> ModuleType | None:
    """The module of a verifier's first term; None if it is named when training, or is code in a file."""
    ref = parse(verifier).terms[0].ref if verifier else ":"
    if ":" in ref:
        return None
    VERIFIERS.get(ref)
    return sys.modules[VERIFIERS.target(ref).partition(":")[0]]
