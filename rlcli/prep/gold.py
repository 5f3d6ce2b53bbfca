"""Check that the verifier accepts each row's own answer: if not, no response to the row could ever be rewarded."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence

from rlcli.errors import DataError
from rlcli.prep.steps import EXAMPLES, REPORT_EVERY, OnProgress, Row, Rows
from rlcli.prep.steps import Outcome as StepOutcome
from rlcli.scoring.expression import parse
from rlcli.scoring.registry import VERIFIERS
from rlcli.types import Outcome, Verdict

DEADLINE_S = 10.0
AT_ONCE = 10_000
"""Maximum verifications that wait for a process at once, to bound their memory."""


def checked(rows: Rows, skip_bad: bool, on_progress: OnProgress) -> StepOutcome:
    """The rows whose verifier accepts the response that its module's `gold` writes for them.

    Rows are kept unchecked if the module has no `gold`, if it runs programs (NEEDS_SANDBOX), and if the verifier is
    code in a file. Raises `DataError` for the first row that fails, unless `skip_bad`; `UnknownName` for an unknown
    verifier.
    """
    every = [row for some in rows.values() for row in some]
    golds = {name: _has_gold(name) for name in sorted({row.prompt.verifier for row in every})}
    bad: dict[int, DataError] = {}
    with_gold = [row for row in every if golds[row.prompt.verifier]]
    for row, problem in zip(with_gold, _problems(with_gold, on_progress), strict=True):
        if problem:
            why = f"the verifier '{row.prompt.verifier}' rejects the row's own answer {row.prompt.ground_truth!r:.80}"
            bad[id(row)] = DataError(f"{row.where}: {why}: {problem}", "fix that row of the source")
    if bad and not skip_bad:
        first = next(iter(bad.values()))
        more = f" (and {len(bad) - 1} more rows)" if len(bad) > 1 else ""
        raise DataError(first.message + more, f"{first.hint}, leave such rows out with --skip-bad, or use --no-check")
    unchecked = Counter(row.prompt.verifier for row in every if not golds[row.prompt.verifier])
    notes = [error.message for error in list(bad.values())[:EXAMPLES]]
    notes += [f"{count} rows of the verifier '{name}' are not checked here" for name, count in unchecked.items()]
    kept = {split: [row for row in some if id(row) not in bad] for split, some in rows.items()}
    return StepOutcome(kept, {"answer refused": len(bad)}, notes)


def _problems(rows: Sequence[Row], on_progress: OnProgress) -> list[str]:
    """For each row, why its answer is refused; empty if it is accepted. `gold` runs in the scoring processes too: what
    a row makes of it must not hold up the command."""
    from rlcli.scoring.golds import gold_expression
    from rlcli.scoring.processes.pool import ScoringPool

    if not rows:
        return []
    problems: list[str] = []
    first = {name: parse(name).terms[0] for name in sorted({row.prompt.verifier for row in rows})}
    expressions = {name: gold_expression(VERIFIERS.target(term.ref), term) for name, term in first.items()}
    with ScoringPool(len(os.sched_getaffinity(0)), DEADLINE_S, sorted(set(expressions.values()))) as pool:
        for start in range(0, len(rows), AT_ONCE):
            some = rows[start : start + AT_ONCE]
            waiting = [pool.submit(expressions[row.prompt.verifier], row.prompt.request()) for row in some]
            for future in waiting:
                problems.append(_problem(future.result()))
                if len(problems) % REPORT_EVERY == 0:
                    on_progress("check answers", len(problems), len(rows))
    return problems


def _problem(verdict: Verdict) -> str:
    from rlcli.scoring.golds import STATED

    if verdict.outcome is Outcome.OK:
        return ""
    if verdict.detail.startswith(f"{STATED}: "):
        return verdict.detail.removeprefix(f"{STATED}: ")
    return f"{verdict.outcome}" + (f", {verdict.detail}" if verdict.detail else "")


def _has_gold(expression: str) -> bool:
    """Whether the module of the expression's first verifier, which scores the answer, writes responses to check."""
    ref = parse(expression).terms[0].ref
    if ":" in ref:
        return False
    VERIFIERS.get(ref)
    module = sys.modules[VERIFIERS.target(ref).partition(":")[0]]
    return not getattr(module, "NEEDS_SANDBOX", False) and hasattr(module, "gold")
