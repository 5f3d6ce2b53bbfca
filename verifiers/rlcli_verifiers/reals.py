r"""Sets of real numbers as answers write them: `(-\infty,0)\cup(0,\infty)`, `\mathbb{R}\setminus\{0\}`, `|x|\le2`."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from rlcli_verifiers import symbolic
from rlcli_verifiers.notation import number, split

MAX_PARTS = 20
"""Maximum number of intervals and points of a set."""

_DIGITS = 30
"""Significant digits of an endpoint: two formulas of the same irrational number have the same."""

_NOTATION = re.compile(
    r"\\(?:cup|cap|notin|setminus|backslash|neq?|lor|land|mathbb)(?![A-Za-z])|[<>|]|\\(?:le|ge)q?(?![A-Za-z])"
)
_OR = re.compile(r"\\(?:cup|lor|vee)(?![A-Za-z])|(?<![A-Za-z\\])or(?![A-Za-z])")
_AND = re.compile(r"\\(?:cap|land|wedge)(?![A-Za-z])|(?<![A-Za-z\\])and(?![A-Za-z])")
_WITHOUT = re.compile(
    r"\\(?:setminus|backslash)(?![A-Za-z])|(?<=[\0)}\]R])\s*-\s*(?=\\[\0{])|(?<![A-Za-z\\])except(?![A-Za-z])"
)
_REALS = re.compile(r"\\mathbb\s*(?:R|\{\s*R\s*\})|\\R(?![A-Za-z])")
_MEMBER = re.compile(r"([A-Za-z])\s*\\in(?![A-Za-z])\s*")
_NO_MEMBER = re.compile(r"([A-Za-z])\s*\\notin(?![A-Za-z])\s*")
_REAL_UNKNOWN = re.compile(
    r"^(?:([A-Za-z])\s*\\in\s*)?\\mathbb\s*(?:R|\{\s*R\s*\})\s*(?:[,:|]|except|such\s+that|\\text\s*\{\s*(?:such\s+that|with|where|except|and|,)?\s*\}|\\mid(?![A-Za-z]))?\s*(?=[A-Za-z]\s*\\neq?(?![A-Za-z]))"
)
"""A set of reals before its condition, `x \\in \\mathbb{R}, x \\ne 2`."""
_UNEQUAL = re.compile(r"([A-Za-z])\s*\\neq?(?![A-Za-z])\s*(.+)")
_EQUAL = re.compile(r"([A-Za-z])\s*=\s*([^=]+)")
_RELATION = re.compile(r"\\(?:leq|geq|le|ge|lt|gt)(?![A-Za-z])|[<>]=?")
_ABSOLUTE = re.compile(r"\|\s*([A-Za-z])\s*(?:([-+])\s*([^|]+))?\|")
_COMMA = re.compile(r"[,;]")


class Reals(NamedTuple):
    """A set of real numbers: it changes only at `ends`.

    `[1, 2)` has the ends 1 and 2, and `contains(x)` is 1 <= x < 2.
    """

    ends: frozenset[Fraction]
    """All bounds and points at which membership may change."""
    contains: Callable[[Fraction], bool]
    """Membership of a number."""
    unknown: str = ""
    """The letter of an inequality; empty for an interval."""


def same(gold: str, answer: str) -> bool:
    """True if both are the same set of real numbers, and one of them is written with more than an interval."""
    if not (_NOTATION.search(gold) or _NOTATION.search(answer)):
        return False
    ours, theirs = read(gold), read(answer)
    if ours is None or theirs is None or (ours.unknown and theirs.unknown and ours.unknown != theirs.unknown):
        return False
    ends = sorted(ours.ends | theirs.ends)
    if not ends or len(ends) > 4 * MAX_PARTS:
        return False
    between = [(low + high) / 2 for low, high in pairwise(ends)]
    return all(ours.contains(x) == theirs.contains(x) for x in (*ends, *between, ends[0] - 1, ends[-1] + 1))


def read(text: str) -> Reals | None:
    """The set that a text describes; None if it is in no form that is read here."""
    text = text.strip()
    if excluded := _NO_MEMBER.match(text):
        outside = read(text[excluded.end() :])
        return outside and Reals(outside.ends, lambda x: not outside.contains(x), excluded[1])
    text = _REAL_UNKNOWN.sub("", text)
    if member := _MEMBER.match(text):
        inside = read(text[member.end() :])
        return inside and inside._replace(unknown=member[1])
    for separator, combine in _COMBINATIONS:
        parts = split(text, separator)
        if len(parts) > 1:
            return _combined(parts, combine)
    for reader in (_unequal, _inequality, _interval, _points):
        result = reader(text)
        if result is not None:
            return result
    return None


def _combined(parts: list[str], combine: Callable[[list[bool]], bool]) -> Reals | None:
    sets = [read(part) for part in parts] if len(parts) <= MAX_PARTS else [None]
    members = [part for part in sets if part is not None]
    unknowns = {part.unknown for part in members} - {""}
    if len(members) < len(sets) or len(unknowns) > 1:
        return None
    return Reals(
        frozenset[Fraction]().union(*(part.ends for part in members)),
        lambda x: combine([part.contains(x) for part in members]),
        "".join(unknowns),
    )


_COMBINATIONS: tuple[tuple[re.Pattern[str], Callable[[list[bool]], bool]], ...] = (
    (_OR, any),
    (_AND, all),
    (_WITHOUT, lambda inside: inside[0] and not any(inside[1:])),
)
"""Separator → combination of the parts' memberships, lowest precedence first."""


def _points(text: str) -> Reals | None:
    r"""`\{1, 2\}`, `x = 1`; and, after `\setminus`, `x = 1, 2` or a bare number."""
    unknown = ""
    if equation := _EQUAL.fullmatch(text):
        unknown, text = equation[1], equation[2]
    elif text.startswith(r"\{") and text.endswith(r"\}"):
        text = text[2:-2]
    values = _values(text)
    return Reals(values, values.__contains__, unknown) if values else None


def _unequal(text: str) -> Reals | None:
    r"""`x \neq 0`, `x \ne 1, 2`, `x \ne 1, x \ne 2`, `x \ne \pm 1`."""
    parts = [part for part in split(text, _COMMA) if part]
    unknown, excluded = "", frozenset[Fraction]()
    for part in parts[:MAX_PARTS]:
        match = _UNEQUAL.fullmatch(part)
        values = _values(match[2] if match else part) if match or unknown else None
        if values is None or (match and unknown and match[1] != unknown):
            return None
        unknown, excluded = unknown or (match[1] if match else ""), excluded | values
    return Reals(excluded, lambda x: x not in excluded, unknown) if excluded else None


def _values(text: str) -> frozenset[Fraction] | None:
    values = set()
    for part in split(text, _COMMA)[:MAX_PARTS]:
        signs = ("+", "-") if r"\pm" in part else ("",)
        for sign in signs:
            value = _value(part.replace(r"\pm", sign, 1).removeprefix("+").strip())
            if value is None:
                return None
            values.add(value)
    return frozenset(values)


def _interval(text: str) -> Reals | None:
    r"""`[-1, \infty)`, and `\mathbb{R}`."""
    if _REALS.fullmatch(text):
        return Reals(frozenset(), lambda _: True)
    if text[:1] not in "([" or text[-1:] not in ")]" or len(text) < len("(0,0)"):
        return None
    bounds = split(text[1:-1], _COMMA)
    return _between(bounds[0], bounds[1], text[0] == "[", text[-1] == "]") if len(bounds) == 2 else None


def _inequality(text: str) -> Reals | None:
    r"""`x > 3`, `1 < x \le 2`, `|x| < 3`, `|x - 1| \ge 2`."""
    relations = [match[0] for match in _RELATION.finditer(text)]
    sides = [side.strip() for side in _RELATION.split(text)]
    down = ["l" in relation or "<" in relation for relation in relations]
    closed = ["e" in relation or "=" in relation for relation in relations]
    if len(sides) == 3 and down[0] == down[1] and re.fullmatch("[A-Za-z]", sides[1]):
        first, last = (0, 2) if down[0] else (2, 0)
        between = _between(sides[first], sides[last], closed[first // 2], closed[last // 2])
        return between and between._replace(unknown=sides[1])
    if len(sides) != 2:
        return None
    if _value(sides[0]) is not None or re.fullmatch(r"[-+]?\s*\\infty", sides[0]):
        sides, down = sides[::-1], [not down[0]]
    if absolute := _ABSOLUTE.fullmatch(sides[0]):
        return _absolute(absolute, sides[1], down[0], closed[0])
    if not re.fullmatch("[A-Za-z]", sides[0]):
        return None
    low, high = (r"-\infty", sides[1]) if down[0] else (sides[1], r"\infty")
    half_line = _between(low, high, closed[0] and not down[0], closed[0] and down[0])
    return half_line and half_line._replace(unknown=sides[0])


def _absolute(match: re.Match[str], bound: str, down: bool, closed: bool) -> Reals | None:
    shift, radius = _value(match[3]) if match[3] else Fraction(0), _value(bound)
    if shift is None or radius is None or radius <= 0:
        return None
    center = -shift if match[2] == "+" else shift

    def contains(x: Fraction) -> bool:
        distance = abs(x - center)
        return (distance < radius) == down if distance != radius else closed

    return Reals(frozenset([center - radius, center + radius]), contains, match[1])


def _between(low: str, high: str, low_closed: bool, high_closed: bool) -> Reals | None:
    """The interval between two bounds, of which the outer ones may be infinite."""
    start = None if re.fullmatch(r"-\s*\\infty", low.strip()) else _value(low)
    end = None if re.fullmatch(r"\+?\s*\\infty", high.strip()) else _value(high)
    if (start is None and r"\infty" not in low) or (end is None and r"\infty" not in high):
        return None
    if (start is None and low_closed) or (end is None and high_closed):
        return None

    def contains(x: Fraction) -> bool:
        above = start is None or x > start or (low_closed and x == start)
        return above and (end is None or x < end or (high_closed and x == end))

    return Reals(frozenset(bound for bound in (start, end) if bound is not None), contains)


def _value(text: str) -> Fraction | None:
    """A number, rounded to `_DIGITS`; None for a text with unknowns."""
    text = text.strip()
    plain = number(text)
    value = plain[0] if plain else symbolic.decimal(text) if text else None
    return None if value is None else _rounded(value)


def _rounded(value: Fraction) -> Fraction:
    bits = value.numerator.bit_length() - value.denominator.bit_length()
    scale = Fraction(10) ** (_DIGITS - round(bits * 0.30103))
    return Fraction(round(value * scale)) / scale
