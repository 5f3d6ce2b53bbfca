"""GSM8K: one number, after `####`."""

from __future__ import annotations

import re
from decimal import Decimal

from rlcli.types import Outcome, Verdict, VerifyRequest

MAX_DIGITS = 100
"""A longer number is no answer to a question of this kind."""

# `-1,234.50`, `$5`, `-$5`; a minus counts only where it cannot be a subtraction.
_NUMBER = (
    r"(?:\\?\$)?(?P<sign>(?<![\w)])-)?(?:\\?\$)?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)(?:\.\d++)?|\.\d++)"
)
# Possessive digits and no operator after them: `#### 42/2` must not read as 42, nor as 4.
_MARKED = re.compile(rf"####\s*{_NUMBER}(?![.,]?\d|[/*^+=])")
_ANYWHERE = re.compile(_NUMBER)


def verify(request: VerifyRequest) -> Verdict:
    """The number after the last #### equals the ground truth (extra_info answer_format = "flexible": the last number).

    The ground truth is the bare number or a GSM8K answer that ends in `#### N`; `42.00`, `$42` and `42.` equal `42`.
    Raises `ValueError` where it holds no number, which is the row's fault.
    """
    gold = _marked(request.ground_truth) if "####" in request.ground_truth else _last(request.ground_truth)
    if gold is None:
        raise ValueError(f"the ground truth {request.ground_truth!r} is no number")
    read = _last if request.extra_info.get("answer_format") == "flexible" else _marked
    answer = read(request.completion)
    if answer is None:
        return Verdict(score=0.0, outcome=Outcome.NO_ANSWER)
    right = answer == gold
    return Verdict(score=float(right), outcome=Outcome.OK if right else Outcome.WRONG, answer=f"{answer:f}")


def _marked(text: str) -> Decimal | None:
    start = text.rfind("####")
    match = _MARKED.match(text, start) if start >= 0 else None
    return _value(match)


def _last(text: str) -> Decimal | None:
    match = None
    for match in _ANYWHERE.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    return _value(match)


def _value(match: re.Match[str] | None) -> Decimal | None:
    if match is None or len(match["digits"]) > MAX_DIGITS:
        return None
    value = Decimal(match["digits"].replace(",", ""))
    return -value if match["sign"] else value
