"""How answers are written: one spelling for LaTeX that means the same, and numbers, units and lists taken apart."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

_SIGNS = str.maketrans(
    {
        **{"−": "-", "–": "-", "—": "-"},
        **{"×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "÷": r"\div ", "≤": r"\le ", "≥": r"\ge ", "∞": r"\infty "},
        **{"π": r"\pi ", "√": r"\sqrt ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "≠": r"\ne ", "°": r"^\circ "},
        **{"±": r"\pm ", "∅": r"\emptyset ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "\u00a0": " ", "\u202f": " "},
        **dict.fromkeys("\u200b\u2060\ufeff", ""),
    }
)
_INVISIBLE = re.compile(
    r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr)(?![A-Za-z])\.?|\\(?:displaystyle|textstyle|limits|phantom)(?![A-Za-z])"
    r"|\\[!,;:>]|\\(?:quad|qquad)(?![A-Za-z])|(?<!\\)\\ |~|(?<!\\)\$"
)
_GROUPED = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,|\\ |\\!,|\{,\}\\!)(?=\d{3}(?!\d))")
_JOINER = re.compile(r"\\(?:text|mbox|textrm|textnormal|mathrm)\s*\{\s*(,?)\s*(or|and)\s*\}")
_FONT = re.compile(  # of one letter, but `5\text{m}` has a unit
    r"(?!(?<=[\d}\s,;~!])\\(?:text|mathrm|mbox)\s*\{[ghlms]\})\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|boldsymbol|mathcal|mbox|bf|rm)\s*\{([A-Za-z])\}"
)
_WRAPPED = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|it|rm|sf)|mbox|boldsymbol|underline)\s*\{([^{}]*)\}"
)
_ARRAY = re.compile(r"[(\[]\s*\\begin\{array\}\s*\{[clr|\s]*\}(.*?)\\end\{array\}\s*[)\]]")
_WORDY = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")

_SIGN = r"(?P<sign>[-+]?)"
_DIGITS = r"\d+(?:\.\d*)?|\.\d+"
_PLAIN = re.compile(rf"{_SIGN}(?P<left>{_DIGITS})(?:/(?P<right>\d+))?", re.ASCII)
_FRAC = re.compile(rf"{_SIGN}(?P<whole>\d+)?\\frac\{{(?P<over>[-+]?(?:{_DIGITS}))\}}\{{(?P<under>-?\d+)\}}", re.ASCII)
_MIXED = re.compile(rf"{_SIGN}(?P<whole>\d+) +(?P<over>\d+)/(?P<under>\d+)", re.ASCII)
_SCIENTIFIC = re.compile(
    rf"{_SIGN}(?:(?P<left>{_DIGITS})(?:\\times|\\cdot|\*))?10\^\{{?(?P<exponent>-?\d{{1,4}})\}}?"
    rf"|(?P<esign>[-+]?)(?P<eleft>{_DIGITS})[eE](?P<eexponent>[-+]?\d{{1,3}})",
    re.ASCII,
)
_REPEATING = re.compile(
    rf"{_SIGN}(?P<whole>\d*)\.(?P<fixed>\d*)\\(?:overline|bar)(?:\{{(?P<period>\d+)\}}|(?P<digit>\d))", re.ASCII
)

_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:percent|%|\\%)\s*\}|\bpercent)\s*$")
_DEGREES = re.compile(r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree)\s*(?:[CF]|\\text\{[CF]\})?\s*$")
_TEXT_UNIT = re.compile(r"\s*\\(?:text|textrm|textnormal|mathrm|mbox)\s*\{([^{}]*)\}\s*(?:\^\s*\{?\s*(\d)\s*\}?)?\s*$")
_BARE_UNIT = re.compile(r"(?<=[\d}).])\s*(?<![A-Za-z\\])([A-Za-z][A-Za-z. ]*?)(?:\^\{?(\d)\}?)?$")
_ORDINAL = re.compile(r"(?<=\d)\s*(?:\^\s*)?\{?(?:\\(?:text|mathrm|mbox)\s*\{)?\s*(?:st|nd|rd|th)\s*\}*$")
_MONEY = re.compile(r"^(?:\\\$|[$£€]|\\text\{\s*(?:USD|\\?\$)\s*\})\s*|^(-)\s*(?:\\\$|[$£€])\s*")
_APPROXIMATE = re.compile(r"^\s*(?:\\approx|≈|\\text\{\s*(?:about|approximately)\s*\}|about |approximately )\s*")
_FUNCTIONS = {"sin", "cos", "tan", "log", "ln", "cot", "sec", "csc", "exp", "max", "min", "mod", "gcd", "lcm"}
_UNITS = {
    "cm": "cm", "centimeter": "cm", "centimetre": "cm", "mm": "mm", "m": "m", "meter": "m", "metre": "m", "km": "km",
    "kilometer": "km", "in": "in", "inch": "in", "inche": "in", "ft": "ft", "feet": "ft", "foot": "ft", "yd": "yd",
    "yard": "yd", "mi": "mi", "mile": "mi", "mph": "mph", "g": "g", "gram": "g", "kg": "kg", "kilogram": "kg",
    "lb": "lb", "pound": "lb", "oz": "oz", "ounce": "oz", "s": "s", "sec": "s", "second": "s", "min": "min",
    "minute": "min", "h": "h", "hr": "h", "hour": "h", "day": "day", "week": "week", "month": "month", "year": "year",
    "dollar": "$", "cent": "cent", "usd": "$", "degree": "deg", "l": "l", "liter": "l", "litre": "l", "ml": "ml",
}  # fmt: skip


class Measure(NamedTuple):
    """A quantity: what it says without the rest, whether in percent, its unit (empty: unknown or none), whether «≈»."""

    body: str
    percent: bool
    unit: str
    approximate: bool


@lru_cache(maxsize=8192)
def clean(text: str) -> str:
    r"""One spelling: `\dfrac12` and `\tfrac 1 2` as `\frac{1}{2}`, `10{,}000` as `10000`, no sizes, no thin spaces."""
    text = text.translate(_SIGNS).replace("\n", " ").replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    text = _GROUPED.sub("", text)
    text = _FRACTION.sub(r"\\frac", _JOINER.sub(r"\1 \2 ", _FONT.sub(r"\1", text)))
    text = _INVISIBLE.sub(" ", text.replace(r"\$", "\\text{$}")).replace("\\text{ }", " ")
    text = re.sub(r"\\(leq|geq)slant(?![A-Za-z])", r"\\\1 ", _ARRAY.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text))
    text = _braced(text).strip().rstrip(".").strip().replace(r"\varnothing", r"\emptyset")
    if whole := _WRAPPED.fullmatch(text):
        text = whole[1].strip()
    text = re.sub(r"^\\\{\s*\\\}$", r"\\emptyset", text)
    return re.sub(r"^(?:[A-Za-z]\s*\\in\s*)?\\mathbb\s*(?:R|\{R\})$", r"(-\\infty,\\infty)", text)


def _braced(text: str) -> str:
    r"""Braces around each argument of `\frac` and `\sqrt`: `\frac1{2}`, `\frac 3 8`, `\sqrt3`, `\sqrt(3)`."""
    parts, start = [], 0
    for match in re.finditer(r"\\(frac|sqrt)(?![A-Za-z])\s*(\[[^\]]*\])?", text):
        if match.start() < start:
            continue
        end = match.end()
        parts += [text[start : match.start()], f"\\{match[1]}{match[2] or ''}"]
        for _ in range(2 if match[1] == "frac" else 1):
            argument, end = _argument(text, end)
            parts.append("{" + _braced(argument) + "}")
        start = end
    return "".join([*parts, text[start:]])


def _argument(text: str, at: int) -> tuple[str, int]:
    """The argument that TeX would read at a position, or what is in parentheses there, and where it ends."""
    while at < len(text) and text[at] == " ":
        at += 1
    if at < len(text) and text[at] in "{(":
        opening, closing, depth = text[at], "})"[text[at] == "("], 0
        for end in range(at, len(text)):
            depth += (text[end] == opening) - (text[end] == closing)
            if depth == 0:
                return text[at + 1 : end].strip(), end + 1
        return text[at + 1 :], len(text)
    command = re.compile(r"\\[A-Za-z]+").match(text, at)
    end = command.end() if command else min(at + 1, len(text))
    return text[at:end], end


def squeezed(text: str) -> str:
    """Without white space and what stands for it, except between digits: `4 2` is not 42."""
    return re.sub(r"(?<!\d) | (?!\d)", "", " ".join(text.replace("\\text{$}", "").split())).rstrip(".")


def mask(text: str) -> str:
    """The text with all that is in brackets, and the brackets, blotted out: as long as it was."""
    kept, depth = [], 0
    for character in text:
        if character in "([{":
            depth += 1
        kept.append("\0" if depth > 0 else character)
        if character in ")]}":
            depth = max(0, depth - 1)
    return "".join(kept)


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """The text between separators that stand outside of all brackets, without white space around."""
    parts, start = [], 0
    for match in separator.finditer(mask(text)):
        parts.append(text[start : match.start()].strip())
        start = match.end()
    return [*parts, text[start:].strip()]


def words(text: str) -> str | None:
    """The text in lower case and single spaces, where it is words rather than mathematics; else None.

    >>> words(r"\\text{October 30}"), words("x+y"), words("even")
    ('october 30', None, 'even')
    """
    plain = " ".join(_WORDY.sub(r" \1 ", text).split())
    if not re.search(r"[A-Za-z]{3}|^no$", plain, re.IGNORECASE) or re.search(r"[\\^_=+*/<>|{}&]", plain):
        return None
    if _WORDY.sub("", text).strip(" .,'") and re.match(r"[-+.\d(\[]", plain):
        return None  # a number and its unit
    return plain.casefold().strip(" .,'\"()")


@lru_cache(maxsize=8192)
def measured(text: str) -> Measure:
    r"""A quantity taken apart: its number or formula, and `\approx`, `\$`, `\%`, `^\circ`, `\text{ cm}^2`, `apples`."""
    text, approximate = _APPROXIMATE.subn("", text)
    text = text.replace("\\text{$}", r"\$").strip()
    money = _MONEY.match(text)
    text = _MONEY.sub(r"\1", text).strip()
    unit = "$" if money else ""
    percent = False
    for _ in range(3):  # `5\text{ cm}^2.`, `50\%\text{ of it}`
        before = text
        text = _ORDINAL.sub("", text)
        for pattern in (_TEXT_UNIT, _BARE_UNIT):
            found = pattern.search(text)
            if found and found.start() > 0 and _is_unit(found[1], text[: found.start(1)], pattern is _TEXT_UNIT):
                text, unit = text[: found.start()].strip(), _unit(found[1], found[2]) or unit
        shorter = _PERCENT.sub("", text)
        percent, text = percent or shorter != text, shorter
        shorter = _DEGREES.sub("", text)
        unit, text = ("deg" if shorter != text else unit), shorter.strip().rstrip(".")
        if text == before:
            break
    return Measure(text, percent, unit, bool(approximate))


def _is_unit(said: str, before: str, is_text: bool) -> bool:
    """Whether words after a number are its unit: in `\\text{}`, known, or set off by a space."""
    parts = said.replace(".", " ").split()
    if is_text:
        return not set(parts) & {"or", "and"} and not re.search(r"\d", said)
    if len(parts) == 1 and len(said) > 1 and (said in _UNITS or said.removesuffix("s") in _UNITS):
        return True
    long = all(len(part) >= 3 and part.lower() not in _FUNCTIONS for part in parts)
    return bool(parts) and long and before[-1:].isspace()


def _unit(said: str, power: str | None) -> str:
    """A known unit by its short name and power, `cm2`; empty for all else."""
    parts = said.lower().replace(".", " ").split()
    if parts and parts[0] in ("square", "sq", "cubic", "cu"):
        power, parts = "2" if parts[0].startswith("s") else "3", parts[1:]
    if len(parts) != 1:
        return ""
    name = _UNITS.get(parts[0]) or _UNITS.get(parts[0].removesuffix("s"), "")
    return name + (power or "") if name else ""


@lru_cache(maxsize=8192)
def number(text: str) -> tuple[Fraction, int] | None:
    r"""The exact value of a plain number, and how many decimals it shows; None for all else.

    Read are `-1.50`, `3/4`, `\frac{3}{4}`, mixed numbers (`3\frac{1}{2}`, `3 1/2`), `1.5 \times 10^{3}` and
    `0.1\overline{6}`.
    """
    text = text.strip()
    if mixed := _MIXED.fullmatch(text):
        return _fraction(mixed, 0)
    text = squeezed(text)
    while text.startswith("{") and text.endswith("}") and "{" not in text[1:-1]:
        text = text[1:-1]
    if plain := _PLAIN.fullmatch(text):
        under = int(plain["right"] or 1)
        places = len(plain["left"].partition(".")[2]) if not plain["right"] else 0
        return (_signed(plain["sign"], Fraction(plain["left"]) / under), places) if under else None
    if frac := _FRAC.fullmatch(text):
        return _fraction(frac, 0)
    if match := _SCIENTIFIC.fullmatch(text):
        left, exponent = match["left"] or match["eleft"] or "1", int(match["exponent"] or match["eexponent"])
        return _signed(match["sign"] or match["esign"] or "", Fraction(left) * Fraction(10) ** exponent), 0
    if match := _REPEATING.fullmatch(text):
        period = match["period"] or match["digit"]
        tail = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(match["fixed"]))
        return _signed(match["sign"], Fraction(f"{match['whole'] or 0}.{match['fixed']}0") + tail), 0
    return None


def _fraction(match: re.Match[str], places: int) -> tuple[Fraction, int] | None:
    under = int(match["under"])
    if not under:
        return None
    part = Fraction(match["over"]) / under
    if match["whole"] and part < 0:
        return None
    return _signed(match["sign"], int(match["whole"] or 0) + part), places


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value
