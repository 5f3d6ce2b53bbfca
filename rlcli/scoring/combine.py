"""Combine the verdicts of several verifiers on one response into one verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlcli.types import Outcome, Verdict

Verified = Verdict | BaseException | None
"""The result of one verifier on one request: its verdict, the exception it raised, or None if it skips the row."""


def combine(expression: str, weights: Mapping[str, float] | None, verified: Sequence[Verified]) -> Verified:
    """The verdict of an expression from those of its terms, or the exception that one of them raised.

    weights: by the name of each term's part, in order; None if the only term's verdict is the result. The outcome,
    the answer and the detail are those of the first term that accepts the row; terms that skip it are left out. A term
    that reports a crash or a timeout sets the outcome of the whole.

    >>> right, long = Verdict(1.0, Outcome.OK, answer="42"), Verdict(0.5, Outcome.WRONG)
    >>> both = combine("math - 0.5 * length", {"math": 1.0, "length": -0.5}, [right, long])
    >>> both.score, both.outcome.value, both.answer, both.parts
    (0.75, 'ok', '42', {'math': 1.0, 'length': 0.5})
    """
    if weights is None and isinstance(verified[0], Verdict):
        return verified[0]
    failed = next((one for one in verified if isinstance(one, BaseException)), None)
    if failed is not None:
        return failed
    odd = next((one for one in verified if one is not None and not isinstance(one, Verdict)), None)
    if odd is not None:
        return TypeError(f"the verifier returned {odd!r:.200}, not a Verdict")
    there = [(name, one) for name, one in zip(weights or [""], verified, strict=True) if isinstance(one, Verdict)]
    if not there:
        return Verdict(0.0, Outcome.NO_ANSWER, detail=f"no verifier of {expression} applies to this row")
    _, first = there[0]
    if weights is None:
        return first
    if broken := next((one for _, one in there if one.outcome in (Outcome.CRASH, Outcome.TIMEOUT)), None):
        return Verdict(0.0, broken.outcome, detail=broken.detail)
    scores = {name: float(one.score) for name, one in there}
    total = math.fsum(weights[name] * score for name, score in scores.items())
    return Verdict(total, first.outcome, first.answer, scores, first.detail)
