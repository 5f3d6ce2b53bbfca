"""Check that the verifier accepts each row's own answer: if not, no response to the row could ever be rewarded."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from rlcli.errors import DataError
from rlcli.prep.steps import EXAMPLES, REPORT_EVERY, OnProgress, Row, Rows
from rlcli.prep.steps import Outcome as StepOutcome
from rlcli.scoring.expression import parse
from rlcli.scoring.registry import VERIFIERS
from rlcli.types import Outcome, Verdict, VerifyRequest

Gold = Callable[[VerifyRequest], str]

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
    golds = {name: _gold(name) for name in sorted({row.prompt.verifier for row in every})}
    bad: dict[int, DataError] = {}
    with_gold = [row for row in every if golds[row.prompt.verifier]]
    for row, problem in zip(with_gold, _problems(with_gold, golds, on_progress), strict=True):
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


def _problems(rows: Sequence[Row], golds: Mapping[str, Gold | None], on_progress: OnProgress) -> list[str]:
    """For each row, why its answer is refused; empty if it is accepted."""
    from rlcli.scoring.processes.pool import ScoringPool

    if not rows:
        return []
    found: list[str] = []
    first = {name: parse(name).terms[0].verifier for name in golds}
    verifiers = sorted({first[row.prompt.verifier] for row in rows})
    with ScoringPool(len(os.sched_getaffinity(0)), DEADLINE_S, verifiers) as pool:
        for start in range(0, len(rows), AT_ONCE):
            waiting: list[Future[Verdict] | str] = []
            for row in rows[start : start + AT_ONCE]:
                name = row.prompt.verifier
                request = _request(row, golds[name])
                waiting.append(request if isinstance(request, str) else pool.submit(first[name], request))
            for one in waiting:
                found.append(one if isinstance(one, str) else _problem(one.result()))
                if len(found) % REPORT_EVERY == 0:
                    on_progress("check answers", len(found), len(rows))
    return found


def _request(row: Row, gold: Gold | None) -> VerifyRequest | str:
    """The row's answer as a response, or why it cannot be written."""
    assert gold is not None, row.prompt.verifier
    try:
        return row.prompt.request(gold(row.prompt.request()))
    except Exception as error:  # whatever is raised, the row has no answer that `gold` can write
        return str(error) or type(error).__name__


def _problem(verdict: Verdict) -> str:
    if verdict.outcome is Outcome.OK:
        return ""
    return f"{verdict.outcome}" + (f", {verdict.detail}" if verdict.detail else "")


def _gold(expression: str) -> Gold | None:
    """The `gold` function of the expression's first verifier, which scores the answer."""
    ref = parse(expression).terms[0].ref
    if ":" in ref:
        return None
    VERIFIERS.get(ref)
    module = sys.modules[VERIFIERS.target(ref).partition(":")[0]]
    return None if getattr(module, "NEEDS_SANDBOX", False) else getattr(module, "gold", None)
