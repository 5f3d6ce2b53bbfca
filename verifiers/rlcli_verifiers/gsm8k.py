"""GSM8K: one number, after `####`."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

from rlcli.types import Verdict, VerifyRequest
from rlcli_verifiers.answers import OPEN_THINK, judged, no_answer

ANSWER_KIND = "number"

MAX_DIGITS = 100
"""A longer number is no answer to a question of this kind."""

# `-1,234.50`, `$5`, `-$5`; a minus counts only where it cannot be a subtraction.
_NUMBER = (
    r"(?:\\?\$)?(?P<sign>(?<![\w)])-)?(?:\\?\$)?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3}){1,40}+(?!\d)|\d++)(?:\.\d++)?|\.\d++)"
)
# Possessive digits and no operator after them: `#### 42/2` must not read as 42, nor as 4.
_MARKED = re.compile(rf"####\s*{_NUMBER}(?![.,]?\d|[ \t]*[/*×^+=]|[ \t]+-[ \t]*\d|-\d|\w)", re.ASCII)
_ANYWHERE = re.compile(_NUMBER, re.ASCII)
# Nothing beside it but a unit: "1/2", "10^5" and "5 1/2" hold numbers and are none of them.
_BARE = re.compile(rf"\s*{_NUMBER}\.?(?:\s*(?:\\?[$%])|\s+[A-Za-z]+)?\s*", re.ASCII)
# What may stand between two numbers of which one is to be picked by the reader.
_BETWEEN = re.compile(r"[^\d\n]{0,30}?(?:\bor\b|\band\b|\bto\b|[,;|/~&])[^\d\n.]{0,20}", re.ASCII | re.IGNORECASE)
_EITHER = re.compile(r"\W*(?:\w+\W+){0,2}?or\W+(?:maybe|perhaps|possibly)?\W*", re.ASCII | re.IGNORECASE)


def verify(request: VerifyRequest, *, mode: Literal["", "strict", "flexible"] = "") -> Verdict:
    """The number after the last #### equals the ground truth; in mode flexible, the last number of the response does.

    mode: "strict" or "flexible"; not given, the row's extra_info answer_format, else strict. Only what follows
    </think> is read. The ground truth is the bare number or a GSM8K answer that ends in `#### N`; `42.00`, `$42` and
    `42.` equal `42`. Two numbers to choose from (`#### 42 or 43`) are WRONG. Raises `ValueError` where the ground truth
    is no number, which is the row's fault.
    """
    mode = mode or request.extra_info.get("answer_format") or "strict"
    if mode not in ("strict", "flexible"):
        raise ValueError(f"mode={mode!r} is neither strict nor flexible")
    right = _truth(request.ground_truth)
    text = request.answer_text()
    if text is None:
        return no_answer(OPEN_THINK)
    match = _marked(text) if mode == "strict" else _last(text)
    answer = _value(match)
    if match is None or answer is None:
        return no_answer("no number after ####" if mode == "strict" else "no number")
    other = _alternative(text, match, mode)
    if other is not None and other != answer:
        return judged(False, f"{answer:f}, {other:f}", "two numbers to choose from")
    return judged(answer == right, f"{answer:f}")


def gold(request: VerifyRequest) -> str:
    """The response `#### N`, which both modes read."""
    return f"So the answer is as follows.\n#### {_truth(request.ground_truth):f}"


def _truth(text: str) -> Decimal:
    value = _value(_marked(text) if "####" in text else _BARE.fullmatch(text))
    if value is None:
        raise ValueError(f"the ground truth {text!r} is no number")
    return value


def _alternative(text: str, match: re.Match[str], mode: str) -> Decimal | None:
    """A second number that the response offers beside the one in `match`."""
    if mode == "strict":
        rest = text[match.end() :].partition("\n")[0]
        other = _ANYWHERE.search(rest)
        return _value(other) if other and _BETWEEN.fullmatch(rest[: other.start()]) else None
    before = list(_ANYWHERE.finditer(text, max(0, match.start() - 200), match.start()))
    return _value(before[-1]) if before and _EITHER.fullmatch(text, before[-1].end(), match.start()) else None


def _marked(text: str) -> re.Match[str] | None:
    start = text.rfind("####")
    return _MARKED.match(text, start) if start >= 0 else None


def _last(text: str) -> re.Match[str] | None:
    match = None
    for match in _ANYWHERE.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    return match


def _value(match: re.Match[str] | None) -> Decimal | None:
    if match is None or len(match["digits"]) > MAX_DIGITS:
        return None
    value = Decimal(match["digits"].replace(",", ""))
    return -value if match["sign"] else value
