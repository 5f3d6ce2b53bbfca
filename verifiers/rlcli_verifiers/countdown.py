"""Countdown: reach a target from given numbers by + - * / and brackets."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

from rlcli.types import Verdict, VerifyRequest
from rlcli_verifiers.answers import OPEN_THINK, judged, last_box, last_line, last_tag, no_answer
from rlcli_verifiers.notation import braced

ANSWER_KIND = "countdown"
ROW_OPTIONS = ("use_all",)

MAX_CHARS = 300
"""Maximum length of an expression that is read."""

MAX_DEPTH = 30
"""Maximum nesting of brackets and signs."""

MAX_DIGITS = 9
"""Maximum digits of one number in an expression."""

MAX_SEARCHED = 6
"""Maximum numbers of a row whose solution is searched for: each further one takes some hundred times as long."""

_TARGET = re.compile(r"\s*[-+]?[0-9]{1,40}(?:\.[0-9]{0,40}|/[0-9]{1,40})?(?:[eE][-+]?[0-9]{1,2})?\s*")

_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])")
_SIGNS = {"×": "*", "⋅": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"}
_COMMANDS = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\,": "", "$": ""}


class _Unreadable(ValueError):
    """An expression that cannot be parsed; the text is the reason."""


def verify(request: VerifyRequest, *, use_all: bool = True) -> Verdict:
    """The expression in the last <answer>…</answer>, else box, else last line yields the target from the numbers.

    Each number is used exactly once; with use_all=false, at most once. `= 24` may follow if it is the target.
    Arithmetic is exact, with fractions; powers, decimals and concatenated digits are not read. The ground truth is
    `{"numbers": [1, 2], "target": 3}`, or the bare target with the numbers in extra_info. Raises `ValueError` if
    numbers or target are missing.
    """
    numbers, target = _problem(request)
    text = request.answer_text()
    if text is None:
        return no_answer(OPEN_THINK)
    statement = last_tag(text) or last_box(text) or last_line(text)
    if not statement:
        return no_answer("no expression")
    expression, _, claimed = _plain(statement).partition("=")
    try:
        value, used = _evaluate(expression)
        claim = target if not claimed else _evaluate(claimed)[0]
    except _Unreadable as error:
        return no_answer(str(error))
    except ZeroDivisionError:
        return judged(False, statement[:MAX_CHARS], "it divides by zero")
    missing, extra = Counter(numbers) - Counter(used), Counter(used) - Counter(numbers)
    if extra or (missing and use_all):
        return judged(False, statement[:MAX_CHARS], f"it uses {sorted(used)} of {sorted(numbers)}")
    return judged(value == target == claim, statement[:MAX_CHARS], f"it makes {value}, the target is {target}")


def gold(request: VerifyRequest, *, use_all: bool = True) -> str:
    """A response with an expression that yields the target: extra_info["solution"], else the result of a search, with
    use_all=false among some of the numbers too.

    Raises `ValueError` if the numbers cannot yield the target.
    """
    numbers, target = _problem(request)
    solution = request.extra_info.get("solution")
    if not solution and len(numbers) > MAX_SEARCHED:
        raise ValueError(f'{len(numbers)} numbers are too many to search: give extra_info "solution"')
    if not solution:
        sizes = [len(numbers)] if use_all else range(len(numbers), 0, -1)
        subsets = (subset for size in sizes for subset in combinations(numbers, size))
        results = (result for subset in subsets for result in _search([(Fraction(n), str(n)) for n in subset]))
        solution = next((text for value, text in results if value == target), "")
    if not solution:
        raise ValueError(f"{numbers} cannot make {target}")
    return f"<think>as it is known</think>\n<answer>{solution}</answer>"


def _problem(request: VerifyRequest) -> tuple[list[int], Fraction]:
    """The numbers and the target of a row."""
    try:
        truth: object = json.loads(request.ground_truth) if request.ground_truth.strip() else {}
        stated = truth if isinstance(truth, dict) else {"target": truth}
        info = {**request.extra_info, **stated}
        target = str(info["target"])
        if not _TARGET.fullmatch(target):
            raise ValueError(target)
        return [int(number) for number in info["numbers"]], Fraction(target)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the ground truth {request.ground_truth!r:.80} and extra_info give no numbers and target"
        ) from error


def _plain(text: str) -> str:
    text = braced(re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", _SIZES.sub("", text[: 4 * MAX_CHARS])))
    for _ in range(MAX_DEPTH):  # from the innermost fraction outwards
        text, count = _FRACTION.subn(r"((\1)/(\2))", text)
        if not count:
            break
    for command, sign in _COMMANDS.items():
        text = text.replace(command, sign)
    return "".join(_SIGNS.get(character, character) for character in text).strip().rstrip(".")


def _evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The value of an expression and the numbers in it. Raises `_Unreadable`, `ZeroDivisionError`."""
    if len(text) > MAX_CHARS:
        raise _Unreadable(f"the expression is longer than {MAX_CHARS} characters")
    tokens: list[str] = _TOKEN.findall(text)
    # Otherwise "1 2" would be two numbers without a sign, which no rule allows, and "2 ** 3" would be 2 * * 3.
    if re.sub(r"\s", "", text) != "".join(tokens) or not tokens:
        raise _Unreadable(f"{text.strip()[:60]!r} is not an expression of + - * / and brackets")
    reader = _Parser(tokens)
    value = reader.sum(0)
    if reader.at < len(tokens):
        raise _Unreadable(f"{text.strip()[:60]!r} cannot be read at {tokens[reader.at]!r}")
    return value, reader.used


class _Parser:
    """sum := product (± product)* · product := atom (*/ atom)* · atom := number | -atom | (sum)"""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at, self.used = tokens, 0, list[int]()

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while (sign := self.take("+", "-")) is not None:
            value = value + self.product(depth) if sign == "+" else value - self.product(depth)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.atom(depth)
        while (sign := self.take("*", "/")) is not None:
            value = value * self.atom(depth) if sign == "*" else value / self.atom(depth)
        return value

    def atom(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise _Unreadable(f"brackets are nested more than {MAX_DEPTH} deep")
        if self.take("-"):
            return -self.atom(depth + 1)
        if self.take("("):
            value = self.sum(depth + 1)
            if not self.take(")"):
                raise _Unreadable("a bracket is not closed")
            return value
        token = self.tokens[self.at] if self.at < len(self.tokens) else "the end"
        if not token.isdigit() or len(token) > MAX_DIGITS:
            raise _Unreadable(f"expected a number and found {token[:20]}")
        self.at += 1
        self.used.append(int(token))
        return Fraction(int(token))

    def take(self, *signs: str) -> str | None:
        if self.at < len(self.tokens) and self.tokens[self.at] in signs:
            self.at += 1
            return self.tokens[self.at - 1]
        return None


def _search(values: list[tuple[Fraction, str]]) -> Iterator[tuple[Fraction, str]]:
    """All results of these values, each used once, with their expressions."""
    if len(values) == 1:
        yield values[0]
        return
    for i, (first, first_text) in enumerate(values):
        for j, (second, second_text) in enumerate(values):
            if i == j:
                continue
            others = [value for k, value in enumerate(values) if k not in (i, j)]
            results = [(first - second, "-")] + ([(first / second, "/")] if second else [])
            results += [(first + second, "+"), (first * second, "*")] if i < j else []
            for value, sign in results:
                yield from _search([*others, (value, f"({first_text} {sign} {second_text})")])
