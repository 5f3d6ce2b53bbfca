"""Combine the verdicts of several verifiers on one response into one verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rlcli.types import UNVERIFIED, USAGE, Outcome, Verdict, is_reward

Verified = Verdict | BaseException | None
"""The result of one verifier on one request: its verdict, the exception it raised, or None if it skips the row."""
SKIPS = "no verifier of "
"""Prefix of the detail of a verdict on a row that every verifier skips."""


def combine(expression: str, weights: Mapping[str, float] | None, verified: Sequence[Verified]) -> Verified:
    """The verdict of an expression from those of its terms, or the exception that one of them raised.

    weights: by the name of each term's part, in order; None if the only term's verdict is the result. The outcome,
    the answer and the detail are those of the first term that accepts the row; terms that skip it are left out. A term
    that gives no verdict (`UNVERIFIED`) sets the outcome of the whole. Costs (`USAGE`) of all terms are added; what
    they log (`LOGGED`, `extra`) stays, that of the last term if several log under one name.

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
        return TypeError(f"the verifier returned {odd!r:.200}, not a Verdict or a number")
    there = [(name, one) for name, one in zip(weights or [""], verified, strict=True) if isinstance(one, Verdict)]
    if not there:
        return Verdict(0.0, Outcome.NO_ANSWER, detail=f"{SKIPS}{expression} applies to this row")
    _, first = there[0]
    if weights is None:
        return first
    aside = _aside(one for _, one in there)
    extra = {name: text for _, one in there for name, text in one.extra.items()}
    if broken := next((one for _, one in there if one.outcome in UNVERIFIED), None):
        return Verdict(0.0, broken.outcome, parts=aside, detail=broken.detail)
    scores = {name: float(one.score) for name, one in there}
    total = math.fsum(weights[name] * score for name, score in scores.items())
    return Verdict(total, first.outcome, first.answer, {**scores, **aside}, first.detail, extra=extra)


def _aside(verdicts: Iterable[Verdict]) -> dict[str, float]:
    """The parts that are no part of a reward."""
    total: dict[str, float] = {}
    for name, value in (part for verdict in verdicts for part in verdict.parts.items()):
        if name.startswith(USAGE):
            total[name] = total.get(name, 0.0) + float(value)
        elif not is_reward(name):
            total[name] = float(value)
    return total
