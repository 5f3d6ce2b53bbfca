"""Compare two short mathematical answers in LaTeX: by text, as numbers, part by part, or by value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from rlcli_verifiers import reals, symbolic
from rlcli_verifiers.notation import (
    Measure,
    clean,
    mask,
    measured,
    number,
    split,
    squeezed,
    with_thousands,
    without_letters,
    words,
)
from rlcli_verifiers.numerals import without_modulus
from rlcli_verifiers.quantities import same_clock, same_date, same_in_other_units, same_ratio, same_sum
from rlcli_verifiers.units import agree

MAX_CHARS = 400
"""Maximum length of an answer; a longer one is compared as text only."""

MAX_ITEMS = 40
"""Maximum length of a list; a longer one is compared as text only."""

ROUNDED_PLACES = 4
"""A ground truth with this many decimals, or `\\approx`, is rounded: an exact answer that rounds to it is right."""

_NAME = re.compile(
    r"(?!\\(?:frac|sqrt|pi|infty)(?![A-Za-z]))[A-Za-z\\][A-Za-z\\_{}'0-9 ]*(?:\([A-Za-z0-9, ]*\))?"
    r"|\([a-z](?:\s*,\s*[a-z])+\)|\|[A-Za-z]{2,}\||[A-Za-z][A-Za-z_{}'0-9]*(?:\s*:\s*[A-Za-z][A-Za-z_{}'0-9]*)+"
)
_LETTERS = r"(?:[A-Za-z]{1,3}|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|sigma|phi|omega|Delta|Phi)(?![A-Za-z]))"
_MARKS = r"(?:\s*(?:_\s*(?:\w|\{[^{}=]*\})|'+|\^\s*(?:\*|\{\s*(?:-1|'|\*|\(\w\)|\\prime|\\circ|T)\s*\}|\\prime)))*"
_CALL_OF = r"(?:\s*[(\[](?:[^=()\[\]]|[(\[][^=()\[\]]{0,30}[)\]]){1,60}+[)\]])*+"
_NAMED_QUANTITIES = (
    rf"{_LETTERS}{_MARKS}{_CALL_OF}",  # f^{-1}(x), a_{n+1}, P(A|B), E[X], f(f(2))
    rf"\(\s*{_LETTERS}(?:\s*\\circ\s*{_LETTERS})+\s*\)\s*\([^=()]{{1,40}}\)",  # (f \circ g)(x)
    r"\\frac\s*\{\s*(?:d|\\partial)[^{}=]{0,20}\}\s*\{\s*(?:d|\\partial)[^{}=]{1,20}\}",  # \frac{dy}{dx}
    r"\\(?:vec|overline|overrightarrow|widehat|hat|bar|tilde)\s*\{[A-Za-z_0-9{}]{1,8}\}",
    r"(?:m\s*)?\\(?:angle|triangle)\s*[A-Z_0-9{}]{1,8}|\|[A-Za-z\\{}_ ]{1,20}\|",
    r"\\(?:text|mathrm|operatorname)\s*\{[A-Za-z .,'-]{1,40}\}(?:\s*\([^=()]{1,40}\))?",
)
_NAMED = re.compile("|".join(_NAMED_QUANTITIES))
"""The left side of an equation that names its right side."""

_FUNCTION_OF = re.compile(
    r"\\(?:sin|cos|tan|cot|sec|csc|log|ln)\s*(?:\\[a-z]+|[A-Za-z]|\(?\s*\\?(?:angle)?\s*[A-Za-z]{1,3}\)?)"
)
_GRAPH = re.compile(r"y|[a-zA-Z](?:\^\{-1\})?\s*\(\s*x\s*\)")
_LABEL = re.compile(
    r"(?:\\(?:text|math)[a-z]*\s*\{\s*)?(?P<open>\()?(?P<letter>[A-J])\s*(?P<close>\)|[.:](?=[\s}]))\s*\}?\s*(?P<value>.*)",
    re.DOTALL,
)
"""A letter and its value, `(B) 12`: an answer to a question with lettered choices."""

_ANY_LABEL = re.compile(r"(?<![A-Za-z\\])\(?[A-J]\s*[).]|(?<![A-Za-z\\])[A-J](?![A-Za-z])\s*$")
_COORDINATE = re.compile(r"([A-Za-z](?:_\{?\d\}?)?)\s*=\s*(.+)")
_LABELLED_POINT = re.compile(
    r"(?:[A-Z](?:_\{?\w\}?|')?|(?:\\text\s*\{\s*)?(?:[Tt]he )?[Pp]oint\s*\}?"
    r"|\\(?:vec|overrightarrow|overline)\{[^{}]{1,6}\})\s*=?\s*(?=\([^()]*,)"
)
_COLUMN = re.compile(r"\\begin\{([pb]matrix)\}(.*)\\end\{\1\}")
_NAMED_SET = re.compile(r"^[A-Z]\s*=\s*(?=\\\{)")
_POINT_OF_BOTH_SIGNS = re.compile(r"\\pm\s*\(([^()]*,[^()]*)\)")
_NAMED_TUPLE = re.compile(r"\(([A-Za-z](?:\s*,\s*[A-Za-z])+)\)\s*=\s*\(([^()]*)\)")
_AXES = ("i", "j", "k")
_AXIS = r"(?:\\(?:hat|vec|mathbf|bold|boldsymbol)\s*\{?\s*(?:\\[ij]math|[ijk])\s*\}?|[ijk])"
_VECTOR_SUM = re.compile(rf"\s*([-+]?\s*[^-+ijk]*?)\s*\*?({_AXIS})(?![A-Za-z])")
_LIST = re.compile(r"[,;]|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|\\(?:cup|lor|vee)(?![A-Za-z])")
_EITHER = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\(?:cup|lor|vee)(?![A-Za-z])")
_BOTH = re.compile(r"(?<![A-Za-z\\])and(?![A-Za-z])|\\(?:cap|land|wedge)(?![A-Za-z])")
_INEQUALITY = re.compile(r"\\(?:leq?|geq?|lt|gt|neq?)(?![A-Za-z])|[<>≠]")
_EQUALS = re.compile(r"(?<![<>!\\])=")
_RELATION = re.compile(r"\\(?:leq|geq|le|ge|lt|gt)(?![A-Za-z])|[<>]=?")
_MEMBER = re.compile(r"\s*[A-Za-z](?:\([a-z]\))?\s*\\in(?![A-Za-z])\s*")
_BASE = re.compile(r"\(?(-?[0-9A-Z]+)\)?_\{?(\d{1,2}|\\text\{\w+\})\}?", re.ASCII)
_TIME = re.compile(r"(\d+):(\d+(?::\d+)?)(?:\\text\{)?([ap]?)\.?m?\.?\}?", re.ASCII | re.IGNORECASE)
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_ABOUT = re.compile(r"\\approx(?![A-Za-z])|≈")
_CHOICE = re.compile(r"(?P<mark>\()?(?P<letter>[A-Za-z])(?(mark)\)|[).:]?)")
_CALL = re.compile(r"[A-Za-z](?:\^\{-1\}|')*\(|_")
_UNKNOWN = re.compile(r"\\(?:frac|cdot|times|sqrt|left|right)(?![A-Za-z])|[^A-Za-z\\]")


class Span(NamedTuple):
    """A point, vector or interval."""

    opening: str
    """Left bracket, `(` or `[`."""
    parts: tuple[str, ...]
    """Coordinates or bounds, as text."""
    closing: str
    """Right bracket."""
    name: str = ""
    """The unknown of an inequality; empty for others."""


def equal(gold: str, answer: str) -> bool:
    """True if two answers, without surrounding text, are equal. The ground truth goes first: it sets the form.

    Bare lists and sets have no order, points do. `x = 5` may stand for `5`, an inequality for an interval. Decimals are
    exact, unless the ground truth is rounded (`ROUNDED_PLACES`). One percent sign may be left out or added (42\\%
    is 42, and is 0.42); so may units, but known ones that differ are wrong.
    """
    if gold.strip() == answer.strip():
        return True
    if max(len(gold), len(answer)) > MAX_CHARS or not answer.strip():
        return False
    gold, answer = clean(gold), clean(answer)
    if squeezed(gold) == squeezed(answer):
        return True
    (gold, modulus), (answer, other_modulus) = without_modulus(gold), without_modulus(answer)
    if modulus and other_modulus and modulus != other_modulus:
        return False
    if same_sum(gold, answer):
        return True
    if any(_same(ours, theirs) for ours in _readings(gold) for theirs in _readings(answer)):
        return True
    return reals.same(gold, answer)


def _readings(text: str) -> list[str]:
    r"""The values that a text may mean: `\frac13 \approx 0.333`, either side if true; of `12.5 \approx 13`, 12.5."""
    sides = split(text, _ABOUT)
    if len(sides) != 2 or not all(sides):
        return with_thousands(text)
    value, shown = symbolic.decimal(split(sides[0], _EQUALS)[-1]), number(measured(sides[1]).body)
    if value is not None and shown is not None:
        rounded, decimals = shown
        if abs(value - rounded) * 2 * 10**decimals > 1:
            return [text]
        return [reading for side in sides[: 1 + bool(decimals)] for reading in with_thousands(side)]
    return with_thousands(sides[1]) if _NAME.fullmatch(sides[0]) else [text]


def _same(gold: str, answer: str) -> bool:
    ours, theirs = _items(gold), _items(answer)
    if len(ours) != len(theirs):
        ours, theirs = _as_points(ours, theirs)
    if len(ours) != len(theirs) or len(ours) > MAX_ITEMS:
        return False
    if _confuse_and_with_or(gold, answer):
        return False
    if len(ours) == 1:
        return _same_item(ours[0], theirs[0])
    names = {squeezed(split(item, _EQUALS)[0]) for item in ours if len(split(item, _EQUALS)) > 1}
    if len(names) > 1 and all(len(split(item, _EQUALS)) == 1 for item in theirs):
        return all(map(_same_item, ours, theirs))  # AB = 9, CD = 4: without names, the order identifies them
    return _same_in_any_order(ours, theirs)


def _confuse_and_with_or(gold: str, answer: str) -> bool:
    """True if inequalities are joined by "or" in one text and by "and" in the other; a comma may mean either."""
    if not any(_INEQUALITY.search(mask(text)) for text in (gold, answer)):
        return False
    joiners = [(bool(_EITHER.search(mask(text))), bool(_BOTH.search(mask(text)))) for text in (gold, answer)]
    return sorted(joiners) == [(False, True), (True, False)]


def _same_in_any_order(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    unmatched = list(theirs)
    for item in ours:
        match = next((other for other in unmatched if squeezed(other) == squeezed(item)), None)
        match = match if match is not None else next((other for other in unmatched if _same_item(item, other)), None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


def _as_points(ours: list[str], theirs: list[str]) -> tuple[list[str], list[str]]:
    """`x = 3, y = 4` as the point `(3, 4)`, if the other side is one point."""
    for one, other in ((ours, theirs), (theirs, ours)):
        if len(one) > 1 and len(other) == 1 and (named := _NAMED_TUPLE.fullmatch(other[0])):
            pairs = list(zip(named[1].split(","), named[2].split(","), strict=False))
            if len(pairs) == len(one) == named[2].count(",") + 1:
                items = [f"{name.strip()}={value.strip()}" for name, value in pairs]
                return (one, items) if one is ours else (items, one)
    if len(theirs) == 1 and _span(theirs[0]):
        return _point(ours) or ours, theirs
    if len(ours) == 1 and _span(ours[0]):
        return ours, _point(theirs) or theirs
    return ours, theirs


def _point(items: list[str]) -> list[str] | None:
    matches = [_COORDINATE.fullmatch(item) for item in items]
    coordinates = {match[1]: match[2] for match in matches if match}
    if len(coordinates) != len(items):
        return None
    return [f"({','.join(coordinates[name] for name in sorted(coordinates))})"]


def _items(text: str) -> list[str]:
    """The elements of a list, set or union; any other text is its own only element."""
    text = _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text
    text = _NAMED_SET.sub("", text, count=1)
    if squeezed(text) == r"\{\emptyset\}":
        return [text]
    if text.startswith(r"\{") and text.endswith(r"\}") and mask(text[1:-2] + text[-1]).strip("\0") == "":
        text = text[2:-2]
    elif text.startswith("{") and text.endswith("}") and "\0" * len(text) == mask(text):
        text = text[1:-1]
    items: list[str] = []
    for item in split(text, _LIST):
        if both := _both_signs(item):
            items += both
        elif len(_PLUS_MINUS.findall(item)) == 1:
            items += [_PLUS_MINUS.sub(sign, item) for sign in "+-"]
        elif item:
            items.append(item)
    return items or [text]


def _both_signs(item: str) -> list[str]:
    r"""The two points that `\pm(1, -1)` and `(\pm1, \mp1)` stand for; none for any other text."""
    if point := _POINT_OF_BOTH_SIGNS.fullmatch(item):
        parts = split(point[1], re.compile(","))
        return [f"({point[1]})", f"({','.join(f'-({part})' for part in parts)})"]
    if item.startswith("(") and r"\pm" in item and r"\mp" in item:
        return [
            item.replace(r"\pm", upper).replace(r"\mp", lower).replace("(+", "(").replace(",+", ",").replace(", +", ",")
            for upper, lower in ("+-", "-+")
        ]
    return []


def _same_item(gold: str, answer: str) -> bool:
    if squeezed(gold) == squeezed(answer):
        return True
    is_same_choice = _same_choice(gold, answer)
    if is_same_choice is not None:
        return is_same_choice
    if same_date(gold, answer):
        return True
    phrase = words(gold)
    if phrase is not None:  # math-verify would read a word as a product of letters, equal to its anagrams
        return phrase == words(answer)
    sides, others = split(gold, _EQUALS), split(answer, _EQUALS)
    if max(len(sides), len(others)) > 1:
        return _same_equation(sides, others)
    span, other = _spans(gold, answer)
    if span and other:
        return _same_span(span, other)
    if span or other:
        return False
    if ":" in gold or ":" in answer:
        return _same_time(gold, answer) or same_clock(gold, answer) or same_ratio(gold, answer)
    return _same_quantity(measured(gold), measured(answer))


def _same_choice(gold: str, answer: str) -> bool | None:
    """Compare two lettered choices, of which each may have its value; None if neither is a choice."""
    ours, theirs = _choice(gold), _choice(answer)
    if ours and theirs:
        return ours[0] == theirs[0] or (ours[1] and theirs[1] and ours[0].lower() == theirs[0].lower())
    label, other_label = _labelled(gold), _labelled(answer)
    if label or other_label:
        return _same_label(label or (None, gold), other_label or (None, answer))
    return None


def _spans(gold: str, answer: str) -> tuple[Span | None, Span | None]:
    """Both texts as points or intervals; a vector is one beside a point or another notation of vectors."""
    span, other = _span(gold), _span(answer)
    if span or other:
        sides = span or _vector(gold), other or _vector(answer)
        is_beside_vector = None in (span, other)  # so `[1, 2]` is a vector too
        return (_as_vector(sides[0]), _as_vector(sides[1])) if is_beside_vector else sides
    if "matrix" in gold and "matrix" in answer:
        return None, None
    vector, other_vector = _vector(gold), _vector(answer)
    return (vector, other_vector) if vector and other_vector else (None, None)


def _as_vector(span: Span | None) -> Span | None:
    is_closed = span is not None and (span.opening, span.closing, span.name) == ("[", "]", "")
    return Span("(", span.parts, ")") if span and is_closed else span


def _same_span(gold: Span, answer: Span) -> bool:
    same_brackets = (gold.opening, gold.closing) == (answer.opening, answer.closing)
    same_name = not (gold.name and answer.name) or gold.name == answer.name
    same_length = len(gold.parts) == len(answer.parts)
    return same_brackets and same_name and same_length and all(map(_same, gold.parts, answer.parts))


def _choice(text: str) -> tuple[str, bool] | None:
    """The letter of `(B)`, `\\text{B}`, `B.`, and whether it is certainly a choice, not an unknown; None otherwise."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    match = _CHOICE.fullmatch(squeezed(plain))
    if not match:
        return None
    return match["letter"], bool(match["mark"]) or plain != text or match["letter"] in "ABCDFGH"


def is_choice(text: str) -> bool:
    """True for the letter of a choice, `(B)`, with or without its value."""
    text = clean(text)
    choice = _choice(text)
    return _labelled(text) is not None or (choice is not None and choice[1] and choice[0].isupper())


def _labelled(text: str) -> tuple[str, str] | None:
    """The letter and the value of `(B) 12`; None for any other text, and where the value names another letter."""
    match = _LABEL.fullmatch(text)
    if not match or bool(match["open"]) > (match["close"] == ")"):
        return None
    value = match["value"].strip().removeprefix("}").strip()
    return None if not value or _ANY_LABEL.search(value) else (match["letter"], value)


def _same_label(gold: tuple[str | None, str], answer: tuple[str | None, str]) -> bool:
    """Compare a letter with its value to another, or to a letter or a value alone."""
    (letter, value), (other_letter, other_value) = gold, answer
    if letter and other_letter:
        return letter == other_letter and _same(value, other_value)
    bare = _choice(other_value if letter else value)
    if bare:
        return bare[0] == (letter or other_letter)
    return _same(value, other_value)


def _same_equation(ours: list[str], theirs: list[str]) -> bool:
    """Compare two equations, or an equation and a value; in a chain, the last side counts."""
    ours, theirs = _name_first(ours), _name_first(theirs)
    if len(ours) == 1:
        return _is_solved(theirs) and _same(ours[0], theirs[-1])
    if not _names_value(ours):
        return len(theirs) > 1 and symbolic.same("=".join(ours), "=".join(theirs))
    if len(theirs) == 1:
        return _same(ours[-1], theirs[0])
    if squeezed(ours[0]) == squeezed(theirs[0]) or all(_GRAPH.fullmatch(side) for side in (ours[0], theirs[0])):
        return _same(ours[-1], theirs[-1])
    return symbolic.same("=".join(ours), "=".join(theirs))


def _names_value(sides: list[str]) -> bool:
    """True if the left side of an equation is a name, so that the last side may replace it."""
    if _NAME.fullmatch(sides[0]) or _NAMED.fullmatch(sides[0]):
        return True
    return bool(_FUNCTION_OF.fullmatch(sides[0])) and _value(measured(sides[-1]).body) is not None


def _is_solved(sides: list[str]) -> bool:
    """True if a chain of equations may be replaced by its last side: not `6 = 5`, nor `2x = 10`, which is not solved.

    A number before the last side must be equal to it, to the decimals of the last one.
    """
    *steps, last = sides
    letters = set(_UNKNOWN.sub("", steps[0]))
    is_named = _NAME.fullmatch(steps[0]) or _CALL.search(steps[0])
    if len(letters) == 1 and "\\" not in letters and not (is_named or _NAMED.fullmatch(steps[0])):
        return len(steps) == 1 and not _value(last) and symbolic.same(steps[0], last)  # an identity
    shown = number(measured(last).body)
    for side in steps:
        body = measured(side).body
        value = _value(body)
        end = shown[0] if shown else _value(measured(last).body)
        if value is None or end is None:
            continue
        slack = Fraction(1, 2 * 10 ** shown[1]) if shown and shown[1] else Fraction(0 if number(body) else 1, 10**30)
        if abs(value - end) > slack:
            return False
    return True


def _value(body: str) -> Fraction | None:
    """The value of a number or of a formula without unknowns; None otherwise."""
    plain = number(body)
    return plain[0] if plain else symbolic.decimal(body)


def _name_first(sides: list[str]) -> list[str]:
    """Turn `5 = x` into `x = 5`."""
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]) and not words(sides[1]):
        return sides[::-1]
    return sides


def _span(text: str) -> Span | None:
    """A bracketed list, or the interval that an inequality in one unknown describes; None otherwise."""
    inequality = _interval(text)
    if inequality is not None:
        return inequality
    text = _LABELLED_POINT.sub("", text, count=1) if _LABELLED_POINT.match(text) else text
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]") or mask(text).strip("\0"):
        return None
    parts = split(text[1:-1], re.compile("[,;]"))
    return Span(text[0], tuple(parts), text[-1]) if len(parts) > 1 else None


def _vector(text: str) -> Span | None:
    r"""A column or row of a matrix, or a sum like `3\mathbf{i}+4\mathbf{j}`, as a point; None for any other text."""
    if column := _COLUMN.fullmatch(text.strip()):
        rows = [row.strip() for row in column[2].split(r"\\") if row.strip()]
        parts = rows if len(rows) > 1 else rows[0].split("&") if rows else []
        is_vector = len(parts) > 1 and not any("&" in part for part in parts)
        return Span("(", tuple(part.strip() for part in parts), ")") if is_vector else None
    terms, end = dict[str, str](), 0
    while term := _VECTOR_SUM.match(text, end):
        axis = re.sub(r"\\[a-z]{3,}|[^ijk]", "", term[2].replace("\\imath", "i").replace("\\jmath", "j"))
        if axis not in _AXES or axis in terms:
            return None
        terms[axis], end = re.sub(r"^\+\s*", "", term[1]), term.end()
    if text[end:].strip() or not ("j" in terms or "k" in terms):
        return None
    coefficients = [terms.get(axis, "0") for axis in (_AXES if "k" in terms else _AXES[:2])]
    return Span("(", tuple({"": "1", "-": "-1"}.get(text, text) for text in coefficients), ")")


def _interval(text: str) -> Span | None:
    relations = [match[0] for match in _RELATION.finditer(mask(text))]
    if len(relations) not in (1, 2):
        return None
    sides = split(text, _RELATION)
    down = ["l" in relation or "<" in relation for relation in relations]
    strict = ["e" not in relation and "=" not in relation for relation in relations]
    if len(sides) == 2:
        return _half_line(sides, down[0], strict[0])
    if down[0] != down[1] or not _NAME.fullmatch(sides[1]):
        return None
    (low, name, high), (open_low, open_high) = (sides, strict) if down[0] else (sides[::-1], strict[::-1])
    return Span("(" if open_low else "[", (low, high), ")" if open_high else "]", squeezed(name))


def _half_line(sides: list[str], down: bool, strict: bool) -> Span | None:
    is_unknown = [bool(_NAME.fullmatch(side)) and number(side) is None and side not in (r"\pi", "e") for side in sides]
    if is_unknown == [True, False]:
        name, bound, below = sides[0], sides[1], down
    elif is_unknown == [False, True]:
        name, bound, below = sides[1], sides[0], not down
    else:
        return None
    if below:
        return Span("(", (r"-\infty", bound), ")" if strict else "]", squeezed(name))
    return Span("(" if strict else "[", (bound, r"\infty"), ")", squeezed(name))


def _same_quantity(gold: Measure, answer: Measure) -> bool:
    if not agree(gold.unit, answer.unit) and {gold.unit, answer.unit} != {"deg", "rad"}:
        amount, other_amount = number(gold.body), number(answer.body)
        if not (amount and other_amount) or gold.percent or answer.percent:
            return False
        return same_in_other_units(amount[0], gold.unit, other_amount[0], answer.unit)
    if (gold.percent and answer.unit) or (answer.percent and gold.unit):
        return False
    if _is_angle(gold, answer):
        return symbolic.same(rf"({gold.body})\cdot\frac{{\pi}}{{180}}", answer.body)
    if _is_angle(answer, gold):
        return symbolic.same(gold.body, rf"({answer.body})\cdot\frac{{\pi}}{{180}}")
    base, other_base = _BASE.fullmatch(squeezed(gold.body)), _BASE.fullmatch(squeezed(answer.body))
    if base or other_base:
        bare = not (gold.unit or answer.unit or gold.percent or answer.percent)
        return bare and _same_numeral(base, other_base, squeezed(answer.body))
    one_percent = gold.percent != answer.percent
    ours, theirs = number(gold.body), number(answer.body)
    if ours and theirs:
        values = {ours[0], ours[0] / 100} if one_percent and gold.percent else {ours[0]}
        others = {theirs[0], theirs[0] / 100} if one_percent and answer.percent else {theirs[0]}
        return bool(values & others) or _rounds_to(gold, ours, theirs)
    if squeezed(gold.body) == squeezed(answer.body) != "":
        return True
    if ours and _is_rounded(gold, ours[1]) and "." not in answer.body:
        value = symbolic.decimal(answer.body)
        return value is not None and _rounds_to(gold, ours, (value, 0))
    if gold.unit and not answer.unit and not answer.percent:
        body = without_letters(answer.body, gold.unit)
        if body != answer.body:
            return _same_quantity(gold, Measure(body, False, gold.unit, answer.approximate))
    return symbolic.same(gold.body, answer.body)


def _is_angle(degrees: Measure, radians: Measure) -> bool:
    r"""True if one is in degrees and the other, a multiple of `\pi`, may only be in radians."""
    is_multiple = r"\pi" in radians.body or radians.unit == "rad"
    return degrees.unit == "deg" and radians.unit in ("", "rad") and is_multiple and r"\pi" not in degrees.body


def _is_rounded(gold: Measure, decimals: int) -> bool:
    return gold.approximate or decimals >= ROUNDED_PLACES


def _rounds_to(gold: Measure, ours: tuple[Fraction, int], theirs: tuple[Fraction, int]) -> bool:
    """True if an answer that is exact, or has more decimals, rounds to a rounded ground truth."""
    (value, decimals), (other, shown) = ours, theirs
    finer = shown > decimals or (shown == 0 and other.denominator != 1)
    return _is_rounded(gold, decimals) and finer and abs(value - other) * 2 * 10**decimals <= 1


def _same_time(gold: str, answer: str) -> bool:
    """Times of day and ratios: must match as written, but a.m. or p.m. may be left out."""
    ours, theirs = _TIME.fullmatch(squeezed(gold)), _TIME.fullmatch(squeezed(answer))
    if not (ours and theirs):
        return False
    halves = {ours[3].lower(), theirs[3].lower()} - {""}
    return (int(ours[1]), ours[2]) == (int(theirs[1]), theirs[2]) and len(halves) < 2


def _same_numeral(ours: re.Match[str] | None, theirs: re.Match[str] | None, answer: str) -> bool:
    """Numerals with their base as a subscript, which the answer may omit but not add."""
    if ours and theirs:
        bases = {match[2].removeprefix("\\text{").removesuffix("}") for match in (ours, theirs)}
        return ours[1] == theirs[1] and len(bases) == 1
    return ours is not None and ours[1] == answer
