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
    that gives no verdict (`UNVERIFIED`) sets the outcome of the whole. Costs (`USAGE`) of all terms are added. Logged
    parts (`LOGGED`) and `extra` are merged; the last term wins for equal names.

    >>> right, long = Verdict(1.0, Outcome.OK, answer="42"), Verdict(0.5, Outcome.WRONG)
    >>> both = combine("math - 0.5 * length", {"math": 1.0, "length": -0.5}, [right, long])
    >>> both.score, both.outcome.value, both.answer, both.parts
    (0.75, 'ok', '42', {'math': 1.0, 'length': 0.5})
    """
    if weights is None and isinstance(verified[0], Verdict):
        return verified[0]
    failed = next((result for result in verified if isinstance(result, BaseException)), None)
    if failed is not None:
        return failed
    invalid = next((result for result in verified if result is not None and not isinstance(result, Verdict)), None)
    if invalid is not None:
        return TypeError(f"the verifier returned {invalid!r:.200}, not a Verdict or a number")
    verdicts = [
        (name, result) for name, result in zip(weights or [""], verified, strict=True) if isinstance(result, Verdict)
    ]
    if not verdicts:
        return Verdict(0.0, Outcome.NO_ANSWER, detail=f"{SKIPS}{expression} applies to this row")
    _, first = verdicts[0]
    if weights is None:
        return first
    unrewarded = _unrewarded_parts(result for _, result in verdicts)
    extra = {name: text for _, result in verdicts for name, text in result.extra.items()}
    if broken := next((result for _, result in verdicts if result.outcome in UNVERIFIED), None):
        return Verdict(0.0, broken.outcome, parts=unrewarded, detail=broken.detail)
    scores = {name: float(result.score) for name, result in verdicts}
    total = math.fsum(weights[name] * score for name, score in scores.items())
    return Verdict(total, first.outcome, first.answer, {**scores, **unrewarded}, first.detail, extra=extra)


def _unrewarded_parts(verdicts: Iterable[Verdict]) -> dict[str, float]:
    """The parts that do not count towards a reward: costs, added, and logged values."""
    total: dict[str, float] = {}
    for name, value in (part for verdict in verdicts for part in verdict.parts.items()):
        if name.startswith(USAGE):
            total[name] = total.get(name, 0.0) + float(value)
        elif not is_reward(name):
            total[name] = float(value)
    return total
