"""Formulas: equivalent ways to write one, and formulas that certainly differ. Uncertain cases are left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from rlcli_audit.mutations.quantities import Named, plain_equivalents, quantity
from rlcli_audit.mutations.quantities import wrong as wrong_numbers
from rlcli_audit.values import decimal, number, thousands

_COMMANDS = r"[dt]?frac|sqrt|pi|cdot|times|left|right|sin|cos|tan|cot|sec|csc|ln|log|theta|alpha|beta|omega|[,!; ]"
_SCALAR = re.compile(rf"(?:[0-9a-zA-Z.+\-*/^(){{}} !]|\\(?:{_COMMANDS})(?![a-zA-Z])|\\sqrt\[\d\])+")
_POSITIVE = re.compile(r"(?:[1-9][0-9]*|[+^{} ]|\\(?:[dt]?frac|sqrt|pi|cdot|times)(?![a-zA-Z]))+")
_TEXT = re.compile(r"\\(?:text|textbf|mbox|textrm|mathrm)\s*\{\s*([A-Za-z][A-Za-z ]*)\}")
_WORD = re.compile(r"[A-Za-z][A-Za-z ]{2,}")
_CHOICE = re.compile(r"(?:\\(?:text|textbf|mbox|mathrm)\s*\{)?\(([A-J])\)\}?")
_EQUATION = re.compile(r"(?P<left>[a-zA-Z](?:\([a-z]\))?\s*(?:=|\\in)\s*)(?P<right>[^=<>]+)")
_NUMBER_COMMA = re.compile(r"\d,(?:\\!)?\s*\d{3}(?!\d)|\{,\}")
_ANY_OTHER = ("\\cup", "\\begin{", "\\infty")


def equivalents(answer: str, prompt: str) -> Iterator[Named]:
    """The same answer in other notation; equal by construction. prompt: states whether order matters in a list."""
    for kind, rewrite in _REWRITES.items():
        rewritten = rewrite(answer)
        if rewritten is not None and rewritten.strip() and rewritten != answer:
            yield kind, rewritten
    yield from _reordered(answer, prompt)
    known = quantity(answer)
    if known is None or known.in_base or known.suffix.strip().endswith("%"):
        return
    dressed = known.suffix.strip() or known.prefix.strip()
    if dressed:
        yield "without the unit", known.core
    elif "frac" in known.core or "/" in known.core:
        yield "as a decimal", decimal(known.value) or known.core
    elif known.value.denominator != 1:
        over, under = known.value.numerator, known.value.denominator
        yield "as a fraction", f"{'-' if over < 0 else ''}\\frac{{{abs(over)}}}{{{under}}}"
    else:
        yield from ((kind, text) for kind, text in plain_equivalents(known) if kind in ("trailing zeros", "unit"))
        yield "fraction over one", f"{'-' if known.value < 0 else ''}\\frac{{{abs(known.value)}}}{{1}}"
        yield "unit in \\text", f"{known.core} \\text{{ units}}"
    if known.value.denominator == 1 and abs(known.value) >= 1000 and not dressed:
        for kind, separator in (("", ","), (" in braces", "{,}"), (" with a thin space", ",\\!")):
            yield f"thousands separators{kind}", thousands(int(known.value), separator)


def wrong(answer: str) -> Iterator[Named]:
    """Answers that certainly differ, the most likely mistake first."""
    known = quantity(answer)
    if known is not None:
        yield from wrong_numbers(known)
        return
    equation = _EQUATION.fullmatch(answer.strip())
    if equation:
        for kind, text in wrong(equation["right"]):
            yield kind, equation["left"] + text
        return
    choice = _CHOICE.fullmatch(answer.strip())
    if choice:
        letter = "ABCDEFGHIJ"[("ABCDEFGHIJ".index(choice[1]) + 1) % 4]
        yield "another option", answer.replace(f"({choice[1]})", f"({letter})")
        return
    for forms in (_words, _lists, _scalars, _matrices):
        yield from forms(answer)


def elements(answer: str) -> tuple[str, list[str], str] | None:
    r"""A point, an interval, a set or a list: its opening, its elements, its closing. None for anything else.

    >>> elements(r"\left( 3, \frac{1}{2} \right]")
    ('\\left(', ['3', '\\frac{1}{2}'], '\\right]')
    >>> elements("1,-2")
    ('', ['1', '-2'], '')
    """
    text = answer.strip()
    if _NUMBER_COMMA.search(text):
        return None
    match = re.fullmatch(
        r"(\\left\s*(?:\(|\[|\\\{)|\(|\[|\\\{)(.*?)(\\right\s*(?:\)|\]|\\\})|\)|\]|\\\})", text, re.DOTALL
    )
    opening, inner, closing = match.groups() if match else ("", text, "")
    parts, depth, start = [], 0, 0
    for position, character in enumerate(inner):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if character == "," and depth == 0 and inner[position - 1 : position] != "\\":
            parts.append(inner[start:position].strip())
            start = position + 1
    parts.append(inner[start:].strip())
    return (opening, parts, closing) if depth == 0 and len(parts) > 1 and all(parts) else None


def _words(answer: str) -> Iterator[Named]:
    match = _TEXT.fullmatch(answer.strip())
    word = match[1] if match else answer.strip()
    if not _WORD.fullmatch(word):
        return
    for kind, other in (("another word", "Mercury"), ("anagram", word[::-1])):
        if other.casefold().split() != word.casefold().split():
            yield kind, f"\\text{{{other}}}" if match else other


def _lists(answer: str) -> Iterator[Named]:
    parsed = elements(answer)
    if parsed is None:
        return
    opening, parts, closing = parsed
    values = [number(part) for part in parts]

    def joined(items: list[str]) -> str:
        return f"{opening}{', '.join(items)}{closing}"

    for index, value in enumerate(values):
        if value is None:
            continue
        incremented = decimal(value + 1) or f"\\frac{{{(value + 1).numerator}}}{{{value.denominator}}}"
        if value + 1 not in values:
            yield "element off by one", joined([*parts[:index], incremented, *parts[index + 1 :]])
        break
    if len(parts) > 2 or not opening.endswith(("(", "[")):
        known = [value for value in values if value is not None]
        if len(known) == len(set(known)) == len(parts):
            yield "element dropped", joined(parts[:-1])
            yield "element added", joined([*parts, str(int(max(known)) + 3)])
    first, second = (*values, None)[:2]
    if first is not None and second is not None and first != second and opening.endswith("("):
        yield "elements swapped", joined([parts[1], parts[0], *parts[2:]])
    if first is not None and second is not None and len(parts) == 2 and first < second and "{" not in opening + closing:
        if closing.endswith("]"):
            yield "bracket changed", f"{opening}{', '.join(parts)}{closing[:-1]})"
        elif opening.endswith("["):
            yield "bracket changed", f"{opening[:-1]}({', '.join(parts)}{closing}"


def _scalars(answer: str) -> Iterator[Named]:
    if not _SCALAR.fullmatch(answer) or not re.search(r"\d|\\pi|\\sqrt|[a-z]", answer) or _is_words(answer):
        return
    yield "one more", f"{answer}+1"
    yield "one less", f"{answer}-1"
    if _POSITIVE.fullmatch(answer):
        yield "sign flipped", f"-\\left({answer}\\right)" if "+" in answer else f"-{answer}"


def _is_words(answer: str) -> bool:
    return bool(re.search(r"[A-Za-z]{3}", re.sub(r"\\[a-zA-Z]+", "", answer)))


def _matrices(answer: str) -> Iterator[Named]:
    entry = re.search(r"(?<=matrix\})\s*(-?\d+)(?=\s*(?:\\\\|&))", answer)
    if entry:
        yield "entry off by one", answer[: entry.start()] + f" {int(entry[1]) + 1} " + answer[entry.end() :]
    elif any(mark in answer for mark in _ANY_OTHER) and elements(answer) is None:
        yield "a number instead", "17"


def _reordered(answer: str, prompt: str) -> Iterator[Named]:
    parsed = elements(answer)
    if parsed is None:
        return
    opening, parts, closing = parsed
    question = prompt.casefold()
    listed = not opening and "separated by commas" in question and "order" not in question
    if opening.endswith("\\{") or listed:
        yield "reordered", f"{opening}{', '.join(reversed(parts))}{closing}"


def _sized(answer: str) -> str | None:
    """The answer with brackets as \\left and \\right, if they are not nested."""
    if "\\left" in answer or "\\right" in answer or "\\sqrt[" in answer or "\\big" in answer.casefold():
        return None
    depth = 0
    for character in answer:
        depth += (character in "([") - (character in ")]")
        if depth < 0 or depth > 1:  # nested brackets are not changed
            return None
    if depth or not re.search(r"[(\[]", answer):
        return None
    return re.sub(r"([)\]])", r"\\right\1", re.sub(r"([(\[])", r"\\left\1", answer))


def _narrow(answer: str) -> str | None:
    if "\\text" in answer or "\\mbox" in answer or re.search(r"\d\s+\d", answer):
        return None
    return re.sub(r"(?<!\\)(?:(?<=[^A-Za-z])\s+|\s+(?=[^A-Za-z]))", "", answer)


def _wide(answer: str) -> str | None:
    if "\\text" in answer or "\\mbox" in answer or _NUMBER_COMMA.search(answer):
        return None
    return re.sub(r"\s*([=+,])\s*", r" \1 ", answer)


def _dressed(command: str) -> Callable[[str], str | None]:
    def rewrite(answer: str) -> str | None:
        match = _TEXT.fullmatch(answer.strip())
        return None if match is None else command.format(match[1].strip())

    return rewrite


def _bare_choice(answer: str) -> str | None:
    match = _CHOICE.fullmatch(answer.strip())
    return match[1] if match else None


def _solved(answer: str) -> str | None:
    """The right side of `x=5`, which is equivalent."""
    match = re.fullmatch(r"[a-z]\s*=\s*(.+)", answer.strip())
    return match[1] if match and number(match[1]) is not None else None


_REWRITES: dict[str, Callable[[str], str | None]] = {
    "spaces around": lambda answer: f"  {answer} ",
    "spaces removed": _narrow,
    "spaces added": _wide,
    "\\left and \\right": _sized,
    "\\left and \\right removed": lambda answer: re.sub(r"\\(?:left|right)\s*(?=[()\[\]|\\])", "", answer),
    "\\dfrac": lambda answer: answer.replace("\\frac", "\\dfrac"),
    "\\tfrac": lambda answer: re.sub(r"\\d?frac(?=\{)", r"\\tfrac", answer),
    "\\frac": lambda answer: answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"),
    "fraction without braces": lambda answer: re.sub(r"\\frac\{(\d)\}\{(\d)\}(?!\d)", r"\\frac\1\2", answer),
    "fraction with braces": lambda answer: re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", answer),
    "fraction with a slash": lambda answer: re.sub(r"^(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3", answer),
    "exponent in braces": lambda answer: re.sub(r"\^(\d|\\circ)(?![\da-z])", r"^{\1}", answer),
    "base in braces": lambda answer: re.sub(r"_(\d)$", r"_{\1}", answer),
    "dollar signs": lambda answer: None if "$" in answer else f"${answer}$",
    "\\textbf": _dressed("\\textbf{{{}}}"),
    "bare word": _dressed("{}"),
    "bare letter": _bare_choice,
    "percent sign without backslash": lambda answer: answer.replace("\\%", "%"),
    "variable left out": _solved,
}
