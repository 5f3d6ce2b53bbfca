"""GSM8K: one number, after `####`."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from rlcli.types import Verdict, VerifyRequest
from rlcli_verifiers.alternatives import last_boxes, offered
from rlcli_verifiers.answers import OPEN_THINK, boxes, judged, no_answer
from rlcli_verifiers.notation import clean, measured, number, with_thousands
from rlcli_verifiers.nouns import ARITHMETIC, SCALES, noun
from rlcli_verifiers.units import unit

ANSWER_KIND = "number"
ROW_OPTIONS = ("mode",)

MAX_DIGITS = 100
"""Maximum length of a number that can be an answer to such a question."""

# `-1,234.50`, `$5`, `-$5`; a minus counts only where it cannot be a subtraction.
_NUMBER = (
    r"(?:\\?\$)?(?P<sign>(?<![\w)])-)?(?:\\?\$)?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3}){1,40}+(?!\d)|\d++)(?:\.\d++)?|\.\d++)"
)
# Possessive digits and no operator after them: `#### 42/2` must not read as 42, nor as 4.
_WHOLE = (
    r"(?![.,]?\d|[ \t]*(?:[/*×÷^+=!²³√>·⋅]|<(?!/?[A-Za-z]))|[ \t]*[xX][ \t]*\d|[ \t]+-[ \t]*\d|-\d|[ \t]+\d|[:_]\d|\w)"
)
_MARKED = re.compile(rf"####[\s:]*{_NUMBER}{_WHOLE}", re.ASCII)
_ANYWHERE = re.compile(_NUMBER, re.ASCII)
_AFTER = re.compile(_WHOLE, re.ASCII)
_OPERAND = re.compile(
    r"[\d)!][ \t]*(?:[/*×÷^·⋅]|[xX][ \t])[ \t]*(?:\\?\$)?$|[_^]\{?$|\\(?:[dtc]?frac|sqrt)(?:\{[^{}]*\})?\{?$", re.ASCII
)
# Nothing next to it but a unit: "1/2", "10^5" and "5 1/2" hold numbers and are none of them.
_NOT_A_NUMBER = Decimal("NaN")
_BARE = re.compile(rf"\s*{_NUMBER}\.?(?:\s*(?:\\?[$%])|\s+[A-Za-z]+)?\s*", re.ASCII)
_MARKUP = str.maketrans({"−": "-", "–": "-", "—": "-", "\u00a0": " ", "\u202f": " ", "`": "", "＄": "$"})
_BOLD = re.compile(r"(?<!\d)\*\*|\*\*(?!\s*\d)")
_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[ \t$%\\]*+((?:[A-Za-z][A-Za-z'-]*[ \t]*+){1,12})", re.ASCII)
_AND_A_HALF = re.compile(r"\band[ -]+(?:an?|one|two|three|\w+)[ -]+(?:half|halves|quarters?|thirds?|\w+ths?)\b")
# The text between two numbers that are offered as alternatives.
_BETWEEN = re.compile(r"[^\d\n]{0,30}?(?:\bor\b|\band\b|\bto\b|[,;|/~&])[^\d\n.]{0,20}", re.ASCII | re.IGNORECASE)
_EITHER = re.compile(r"\W*(?:\w+\W+){0,2}?or\W+(?:maybe|perhaps|possibly)?\W*", re.ASCII | re.IGNORECASE)


def verify(request: VerifyRequest, *, mode: Literal["", "strict", "flexible"] = "") -> Verdict:
    """The number after the last #### equals the ground truth; in mode flexible, the last box, else the last number.

    mode: "strict" or "flexible"; by default the row's extra_info answer_format, else strict. Only the text after
    </think> is read. The ground truth is the bare number or a GSM8K answer that ends in `#### N`; `42.00`, `$42` and
    `42.` equal `42`; `42 million` is 42000000; `5!`, `5²`, `42 x 10` and `5 1/2` are not numbers here. Alternatives
    (`#### 42 or 43`) are WRONG. Raises `ValueError` if the ground truth is not a number, which is an error in the
    row.
    """
    mode = mode or request.extra_info.get("answer_format") or "strict"
    if mode not in ("strict", "flexible"):
        raise ValueError(f"mode={mode!r} is neither strict nor flexible")
    right = _truth(request.ground_truth)
    text = request.answer_text()
    if text is None:
        return no_answer(OPEN_THINK)
    text = _plain(text)
    if mode == "flexible" and (marked := boxes(text)) and text.rfind("####") < marked[-1][0]:
        return _boxed(last_boxes(text, marked), right)
    match = _marked(text) if mode == "strict" else _last(text)
    answer = _value(match, text)
    if match is None or answer is None:
        return no_answer("no number after ####" if mode == "strict" else "no number")
    other = _alternative(text, match, mode)
    if other is not None and other != answer:
        return judged(False, f"{answer:f}, {other:f}", "two answers to choose from")
    return judged(answer == right, f"{answer:f}")


def _boxed(stated: list[str], right: Decimal) -> Verdict:
    """The verdict on the content of boxes: one number, in any form that `math` reads as one."""
    values = [_in_box(text) for text in stated]
    if any(value is None for value in values):
        return no_answer("the box holds no number")
    return judged(set(values) == {Fraction(right)}, ", ".join(stated))


def _in_box(text: str) -> Fraction | None:
    if len(text) > MAX_DIGITS:
        return None
    readings = [number(reading) for reading in with_thousands(measured(clean(text)).body)]
    return readings[0][0] if readings[0] else None


def gold(request: VerifyRequest) -> str:
    """The response `#### N`, which both modes read."""
    return f"So the answer is as follows.\n#### {_truth(request.ground_truth):f}"


def _truth(text: str) -> Decimal:
    plain = _plain(text)
    value = _value(_marked(plain) if "####" in plain else _BARE.fullmatch(plain), plain)
    if value is None:
        raise ValueError(f"the ground truth {text!r} is not a number")
    return value


def _plain(text: str) -> str:
    """Remove bold type, and boxes after the last mark; replace all minus signs by one kind."""
    text = _BOLD.sub("", text.translate(_MARKUP))
    head, mark, tail = text.rpartition("####")
    return head + mark + _BOX.sub(r"\1", tail) if mark else text


def _alternative(text: str, match: re.Match[str], mode: str) -> Decimal | None:
    """A second value that the response offers besides the one in `match`; NaN for one that is no number, `\\pi`."""
    for other in offered(text, match.end()):
        value = _in_box(other)
        return _NOT_A_NUMBER if value is None else Decimal(value.numerator) / Decimal(value.denominator)
    if mode == "strict":
        rest = text[match.end() :].partition("\n")[0]
        other_number = _ANYWHERE.search(rest)
        if other_number and _BETWEEN.fullmatch(rest[: other_number.start()]):
            return _value(other_number, rest) or _NOT_A_NUMBER
        return None
    preceding = list(_ANYWHERE.finditer(text, max(0, match.start() - 200), match.start()))
    if preceding and _EITHER.fullmatch(text, preceding[-1].end(), match.start()):
        return _value(preceding[-1], text) or _NOT_A_NUMBER
    return None


def _marked(text: str) -> re.Match[str] | None:
    start = text.rfind("####")
    return _MARKED.match(text, start) if start >= 0 else None


def _last(text: str) -> re.Match[str] | None:
    match = None
    for match in _ANYWHERE.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    return match


def _value(match: re.Match[str] | None, text: str) -> Decimal | None:
    """The number, times the "million" that follows; None if it is part of another one ("5!", "5 and a half")."""
    if match is None or len(match["digits"]) > MAX_DIGITS:
        return None
    rest = text[match.end("digits") : match.end("digits") + 200].partition("\n")[0]
    if rest[:1] == "!" and re.search("[$.,]", match[0]):
        rest = rest[1:]  # `$1,234.50!` is not a factorial
    if not _AFTER.match(rest) or _OPERAND.search(text, max(0, match.start() - 20), match.start("digits")):
        return None
    scale = _scale(rest)
    if scale is None:
        return None
    value = Decimal(match["digits"].replace(",", "")) * scale
    return -value if match["sign"] else value


def _scale(rest: str) -> int | None:
    """The factor that the words after a number multiply it by; None if they change the number in another way."""
    words, scale = _WORDS.match(rest), 1
    if words is None:
        return 1
    following = words[1].lower().split()
    while following and following[0].removesuffix("s") in SCALES:
        scale *= SCALES[following.pop(0).removesuffix("s")]
    phrase = " ".join(following)
    if following and following[-1] in ARITHMETIC and re.match(r"[\s(]*-?\d", rest[words.end() :]):
        return None  # "42 times 10"
    if not following or unit(phrase, True) is not None or noun(phrase) is not None:
        return scale
    return None if ARITHMETIC & set(following[:3]) or _AND_A_HALF.search(phrase) else scale
