r"""Numbers and formulas in prose: between dollars or brackets, or typed as they are (`x = 5`, `\frac{1}{2}`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from rlcli_verifiers.units import unit

FORMULA = re.compile(
    r"\$\$(?P<double>(?:[^$\\]|\\.)++)\$\$|(?<!\\)\$\$?(?P<dollars>(?:[^$\n\\]|\\[^\n]|\n(?!\s*\n))++)\$\$?|\\\((?P<round>.{1,400}?)\\\)"
    r"|\\\[(?P<square>[\s\S]{1,900}?)\\\]|(?P<environment>\\begin\{(?:align|equation|gather|eqnarray)\*?\}[\s\S]{1,900}?\\end\{[a-z]+\*?\})",
    re.DOTALL,
)
"""A formula between dollars or brackets, possibly displayed on several lines."""

_GROUP = r"\{(?:[^{}\n]|\{(?:[^{}\n]|\{[^{}\n]*+\})*+\})*+\}"
_NUMBER = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,|,\\!)\d{3})++(?![\d,]*\d)|\d++)(?:\.\d++)?|\.\d++"
_PROSE = "text mathrm mbox quad qquad boxed fbox begin end textbf item".replace(" ", "|")
_COMMAND = rf"\\(?!(?:{_PROSE})(?![A-Za-z]))[A-Za-z]++(?:\[[^\]\n]*+\])?(?:[ ]?{_GROUP}|[ ]?\d)*+"
_ENVIRONMENT = r"\\begin\{(\w{1,12})\}(?:(?!\\end\b)[\s\S]){0,300}+\\end\{\w{1,12}\}"
_FUNCTION = r"(?<![A-Za-z])(?:sqrt|arc(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|log|ln|exp|pi)(?![A-Za-z])"
_LOGARITHM = r"(?<![A-Za-z])log(?:_\{?\w{1,3}\}?|[₀-₉]{1,3})[ ]?(?=[\d(])"
_LETTER = r"(?<![A-Za-z'’\\])[A-Za-zα-ω](?![A-Za-z'’])"
_PARENTHESES = (
    rf"[(\[](?:\\[A-Za-z]++|{_FUNCTION}|(?![A-Za-z]{{2}})[^()\n\\]|\((?:(?![A-Za-z]{{2}})[^()\n\\])*+\)){{1,80}}+[)\]]"
)
_SYMBOL = r"[πθ∞√∅ℝ½⅓⅔¼¾]"
_ATOM = rf"(?:{_NUMBER}|{_ENVIRONMENT}|{_COMMAND}|{_LOGARITHM}|{_FUNCTION}|{_PARENTHESES}|{_GROUP}|{_SYMBOL}|{_LETTER})"
_SUFFIX = r"[!%°′'²³⁰¹⁴-⁹ⁿ₀-₉]|\\%"
_SIGN = r"[-+−–±]"
_OPERATOR = r"[-+−–*/^_=<>±×÷·⋅≤≥≠≈∈∪∩∖:|]"
_MONEY = r"(?:\\?\$(?=[\d.]))?"
_FIRST = (
    rf"(?:(?!{_LETTER}|[\[(][A-J]\))|(?={_LETTER}\s?(?:[=<>≤≥≈≠∈^_+*/]|[-−]\s?\d|\(\w\)\s?=))"
    rf"|(?<!\d )(?={_LETTER}[²³⁰¹⁴-⁹]))"
)
_RUN = re.compile(
    rf"(?<![A-Za-z0-9_.\\])(?:{_SIGN}[ ]?)?{_MONEY}{_FIRST}{_ATOM}"
    rf"(?:{_SUFFIX}|[ ]?{_OPERATOR}+[ ]?(?:{_SIGN}[ ]?)?{_MONEY}{_ATOM}|[ ]?(?=\\[A-Za-z]){_COMMAND}"
    rf"|(?![\[(]){_ATOM}|(?<=[\w}})])(?=\(){_PARENTHESES})*+"
)
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|operatorname)[a-z]*\s*\{[^{}]*\}|\\[A-Za-z]+")
_ORDINAL = re.compile(r"\s?(?:st|nd|rd|th)\b")
_LETTERS = re.compile(r"[A-Za-z]+")
_NAME = re.compile(r"(?:\\[A-Za-z]+\s*)?\{?[A-Za-z]{1,4}(?:_\{?\w{1,3}\}?)?\}?'*(?:\([a-z](?:,\s*[a-z])*\))?")


class Value(NamedTuple):
    """A number or formula in a text."""

    start: int
    """Position of its first character, a dollar or bracket included."""
    end: int
    """Position after its last character."""
    content: str
    """Its text, without dollars or brackets around it."""
    is_formula: bool
    """Delimited by dollars or brackets."""

    @property
    def is_name(self) -> bool:
        """True for a name, like `$x$` or `$f(x)$`, rather than a value."""
        return bool(_NAME.fullmatch(self.content))


def content(match: re.Match[str]) -> str:
    """The text between the dollars or brackets of a match of `FORMULA`."""
    return next(text for text in match.groupdict().values() if text is not None).strip()


def value_at(text: str, start: int) -> Value | None:
    """The number or formula that starts at a position."""
    formula = FORMULA.match(text, start)
    if formula and not _is_money(formula):
        return Value(formula.start(), formula.end(), content(formula), True)
    run = _RUN.match(text, start)
    return _typed(text, run) if run else None


def _typed(text: str, run: re.Match[str]) -> Value | None:
    """A number or formula without dollars; None if it is a part of a word, like `4th` or `42abc`."""
    if not run[0].strip() or _ORDINAL.match(text, run.end()):
        return None
    letters = _LETTERS.match(text, run.end())
    if letters and unit(letters[0], True) is None:
        return None
    end = letters.end() if letters else run.end()  # `5cm`
    return Value(run.start(), end, text[run.start() : end].strip(), False)


def values(text: str) -> Iterator[Value]:
    """The numbers and formulas of a text from left to right."""
    position, searched = 0, len(text)
    formulas = list(_formulas(text))
    for formula in [*formulas, None]:
        end = formula.start if formula else searched
        while position < end:
            run = _RUN.search(text, position, end)
            if run is None:
                break
            if typed := _typed(text, run):
                yield typed
            position = max(run.end(), position + 1)
        if formula:
            yield formula
            position = formula.end


def masked(text: str) -> str:
    r"""The text with its formulas as `\0`, at its original length; a full stop at the end of a formula is kept."""
    for formula in _formulas(text):
        stop = "." if formula.content.endswith(".") else "\0"
        text = text[: formula.start] + "\0" * (formula.end - formula.start - 1) + stop + text[formula.end :]
    return text


def _formulas(text: str) -> Iterator[Value]:
    position = 0
    while match := FORMULA.search(text, position):
        if _is_money(match):
            position = match.start() + 1
        else:
            yield Value(match.start(), match.end(), content(match), True)
            position = match.end()


def _is_money(match: re.Match[str]) -> bool:
    """True if the dollars of a match are two amounts of money, `$5 and $6`, with prose or an operator between them."""
    if match["dollars"] is None:
        return False
    is_before_digit = match.string[match.end() : match.end() + 1].isdigit()
    return is_before_digit or bool(_WORD.search(_TEXT.sub("", match["dollars"])))
