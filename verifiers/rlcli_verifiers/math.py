"""Mathematics: the final answer, a number or a formula, compared by value."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlcli.types import Outcome, Verdict, VerifyRequest

TAIL_CHARS = 8000
"""The answer is looked for in this many characters at the end of a response."""

MAX_ANSWER_CHARS = 400
"""A longer answer is compared as text only; so is one whose value would take for ever to compute (`_TOO_BIG`)."""

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_PHRASE = re.compile(r"(?:\banswer(?:\s+is\b|\s*[:=]|\**:)|####)[ :*]*(?P<rest>[^\n]+)", re.IGNORECASE)
_DOLLARS = re.compile(r"(?<!\\)\$\$?(?P<dollars>[^$\n]+)(?<!\\)\$\$?|\\\((?P<round>.+?)\\\)|\\\[(?P<square>.+?)\\\]")
_NUMBER_AND_UNIT = re.compile(r"\\?\$?(-?[\d.,/]*\d\s?\\?%?)(?=\.?$|,?\s+[a-z]{2})", re.IGNORECASE)

_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_NOISE = re.compile(r"\\[,!;: ]|\\left(?![a-z])|\\right(?![a-z])|\\?\$")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
_CHOICE = re.compile(r"\(([A-Za-z])\)")
_WORD = re.compile(r"[A-Za-z]{3,}")
_RATIO = re.compile(
    r"(?P<sign>-?)(?:\\frac\{(?P<over>\d+)\}\{(?P<under>\d+)\}|(?P<left>\d+(?:\.\d*)?|\.\d+)(?:/(?P<right>\d+))?)(?P<percent>\\?%)?"
)
# Over 60 digits, exponents over 9999, towers, factorials over 999 or of powers; read without braces and spaces.
_TOO_BIG = re.compile(r"\d{61}|\^\(*-?\d{5}|\^\(*-?\d+\)*\^|\d{4}\)*!|\^-?\d+\)*!|!!")


def verify(request: VerifyRequest) -> Verdict:
    """The last \\boxed{} (else what follows "the answer is", else a last line of mathematics) equals the ground truth.

    Equal is: the same text, the same number, or the same value by math-verify. A percent sign may be left out or added
    (42\\% is 42, and is 0.42), units may follow. The ground truth is the bare answer or a solution with a \\boxed{}.
    """
    answer = extract(request.completion[-TAIL_CHARS:])
    if answer is None:
        return Verdict(score=0.0, outcome=Outcome.NO_ANSWER)
    gold = _last_box(request.ground_truth) or request.ground_truth
    right = equal(gold, answer)
    return Verdict(score=float(right), outcome=Outcome.OK if right else Outcome.WRONG, answer=answer)


def preload() -> None:
    """Import math-verify and build its parser, once, before scoring processes are forked."""
    _equal_by_value(r"\frac{1}{2}", "x+0.5")


def extract(text: str) -> str | None:
    """The final answer that a text states, or None. What comes last counts: a text may correct itself."""
    boxed = _last_box(text)
    if boxed is not None:
        return boxed or None
    phrases = list(_PHRASE.finditer(text))
    if phrases:
        return _of_sentence(phrases[-1]["rest"].strip())
    lines = text.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    formula = _DOLLARS.fullmatch(last)
    if formula:
        return _inside(formula)
    return last if _RATIO.fullmatch(_normal(last)) else None


def equal(gold: str, answer: str) -> bool:
    """Whether two answers, without surrounding text, are the same."""
    plain_gold, plain_answer = _normal(gold), _normal(answer)
    if plain_gold == plain_answer:
        return True
    if any(_too_big(text) for text in (gold, answer)):
        return False
    # math-verify would take a word for a product of letters, and its anagrams for equal.
    if _WORD.fullmatch(plain_gold):
        return plain_gold.casefold() == plain_answer.casefold()
    number_gold, number_answer = _RATIO.fullmatch(plain_gold), _RATIO.fullmatch(plain_answer)
    if number_gold and number_answer:
        one_percent = bool(number_gold["percent"]) != bool(number_answer["percent"])
        ours, theirs = _values(number_gold, one_percent), _values(number_answer, one_percent)
        if ours & theirs:
            return True
        if all(value.denominator == 1 for value in ours | theirs):
            return False
    ours_listed, theirs_listed = _elements(gold), _elements(answer)
    if ours_listed and theirs_listed and len(ours_listed) == len(theirs_listed):
        return all(map(equal, ours_listed, theirs_listed))
    return _equal_by_value(gold, answer)


def _last_box(text: str) -> str | None:
    r"""What the last closed \boxed{} holds; None where there is none."""
    for box in reversed(list(_BOX.finditer(text))):
        depth = 1
        for position in range(box.end(), len(text)):
            character = text[position]
            if character in "{}" and text[position - 1] != "\\":
                depth += 1 if character == "{" else -1
            if depth == 0:
                return text[box.end() : position].strip()
    return None


def _of_sentence(rest: str) -> str | None:
    """The answer in what follows "the answer is": its first formula, or a number before words, or all of it."""
    formula, number = _DOLLARS.search(rest), _NUMBER_AND_UNIT.match(rest)
    if number and not (formula and formula.start() == 0):
        return number[1]
    return _inside(formula) if formula else rest.rstrip(" .*") or None


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


@lru_cache(maxsize=4096)
def _normal(text: str) -> str:
    text = _TEXT.sub(r"\1", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _THOUSANDS.sub("", "".join(_NOISE.sub("", text).split())).rstrip(".")
    choice = _CHOICE.fullmatch(text)
    return choice[1] if choice else text


def _values(number: re.Match[str], one_percent: bool) -> set[Fraction]:
    """What a plain number may stand for: where one of the two has a percent sign, it also stands for its hundredth."""
    over, under = number["over"] or number["left"], number["under"] or number["right"] or "1"
    if not int(under):
        return set()
    value = Fraction(over) / int(under) * (-1 if number["sign"] else 1)
    return {value, value / 100} if one_percent and number["percent"] else {value}


def _elements(text: str) -> list[str] | None:
    """A point or interval as its brackets and elements, `["(", "1", "2", "]"]`; None for all else.

    Compared element by element, because math-verify's parser takes longest over these.
    """
    text = _NOISE.sub("", text).strip()
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]"):
        return None
    elements, depth, start = [text[0]], 0, 1
    for position in range(1, len(text)):
        character = text[position]
        if depth == 0 and (character == "," or position == len(text) - 1):
            elements.append(text[start:position])
            start = position + 1
        depth += (character in "([{") - (character in ")]}")
        if depth < 0 and position < len(text) - 1:
            return None
    return [*elements, text[-1]] if len(elements) > 2 and all(map(str.strip, elements)) else None


def _too_big(text: str) -> bool:
    return len(text) > MAX_ANSWER_CHARS or bool(_TOO_BIG.search(re.sub(r"[{}\s]|\\left|\\right", "", text)))


@lru_cache(maxsize=4096)
def _equal_by_value(gold: str, answer: str) -> bool:
    from math_verify import verify as same

    # No timeouts: they are signal.alarm, useless against C code and wrong off the main thread. Our process gets killed.
    return bool(same(_parse(gold), _parse(answer), timeout_seconds=None))


@lru_cache(maxsize=4096)
def _parse(answer: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no timeout
    # LaTeX only: math-verify reads plain expressions by sympy's parse_expr, which evaluates Python.
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed: list[Any] = parse(f"\\boxed{{{answer}}}", config, parsing_timeout=None)
    return parsed
