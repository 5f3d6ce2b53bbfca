"""Notation of answers: one spelling for equivalent LaTeX, and parsing of numbers, units and lists."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from rlcli_verifiers.nouns import SCALES, noun
from rlcli_verifiers.numerals import endless, periodic, spelled, with_bases, with_roots
from rlcli_verifiers.units import unit as known_unit

_MAX_INFIX = 8
"""Maximum number of `\\over` and `\\choose` that are rewritten."""

DOLLAR = "＄"
"""A dollar that means money, not a formula."""

_SIGNS = {
    **dict.fromkeys("−–—‐‑‒﹣－", "-"),
    **{"×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "÷": r"\div ", "≤": r"\le ", "≥": r"\ge ", "∞": r"\infty "},
    **{
        "⩽": r"\le ",
        "⩾": r"\ge ",
        "≈": r"\approx ",
        "⟨": r"\langle ",
        "⟩": r"\rangle ",
        "〈": r"\langle ",
        "〉": r"\rangle ",
    },
    **{"√": r"\sqrt ", "∛": r"\sqrt[3] ", "∜": r"\sqrt[4] ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "≠": r"\ne "},
    **{
        "±": r"\pm ",
        "∓": r"\mp ",
        "∅": r"\emptyset ",
        "∖": r"\setminus ",
        "°": r"^\circ ",
        "∨": r"\lor ",
        "∧": r"\land ",
    },
    **{"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}"},
    **{"∠": r"\angle ", "△": r"\triangle ", "∣": "|", "⁄": "/", "∕": "/", "∗": "*", "∶": ":", "′": "'", "、": ","},
    **{
        "℃": r"^\circ C",
        "℉": r"^\circ F",
        "µ": r"\mu ",
        "μ": r"\mu ",
        "＄": DOLLAR,
        "\u00a0": " ",
        "\u202f": " ",
        "\u2009": " ",
    },
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", ""),
}
"""Unicode character → its LaTeX spelling."""

_GREEK_NAMES = """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon
    phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega phi epsilon"""
_GREEK = dict(zip("αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩϕϵ", _GREEK_NAMES.split(), strict=True))
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣʸᵃᵇᵏᵐᵗ", "0123456789+-()nixyabkmt", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₐₑₓₙₘₖᵢⱼₜ", "0123456789+-()aexnmkijt", strict=True))
_RAISED_RUN = re.compile(f"[{''.join(_RAISED)}]+")
_LOWERED_RUN = re.compile(f"[{''.join(_LOWERED)}]+")
_OVERLINED = re.compile("((?:\\d\u0305)+)")
_MICRO = re.compile("[µμ](?=[mgslAVFWJ](?![a-z]))")
"""A prefix of a unit, which `units.py` reads; any other mu is a Greek letter."""

_UNIT_SIGNS = frozenset("Ω€£¥¢₹")

_SWITCHES = (
    "tiny scriptsize footnotesize small normalsize large Large LARGE huge Huge bfseries itshape rmfamily sffamily"
)
_STYLES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\(?:textcolor|color|colorbox)\s*(?:\[\w+\])?\s*\{[^{}]*\}"), " "),
    (re.compile(rf"\\(?:{_SWITCHES.replace(' ', '|')})(?![A-Za-z])"), " "),
    (re.compile(r"\\(?:bm|pmb|mathsf|mathtt|mathnormal|ensuremath|mathop|mathrel|mathord)(?=\s*\{)"), r"\\mathrm"),
    (re.compile(r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1\\text{ \2}"),
    (re.compile(r"\\[lr]?vert(?![A-Za-z])"), "|"),
    (re.compile(r"\\colon(?![A-Za-z])|\{:\}|\\!:\\!"), ":"),
    (re.compile(r"(?<=\d)\{,\}(?=(?:\d{1,2}|\d{4,})(?!\d))"), "."),  # a decimal comma
    (re.compile(r"^\s*(?:\\text\s*\{\s*)?Rs\.?\s*\}?\s*(?=\d)"), "₹"),
    (re.compile(r"(?<![\d.,])(\d{1,3})\.(\d{3}),(\d{1,2})(?![\d,.])"), r"\1\2.\3"),  # 1.234,50
    (re.compile(r"^[(\[]([^()\[\]]*,[^()\[\]]*)[)\]]\s*\^\s*\{?\s*(?:T|\\top)\s*\}?$"), r"(\1)"),  # a column
    (re.compile(r"(?:\\(?:checkmark|blacksquare|square|qed|Box)(?![A-Za-z])|[✓✔∎■□\s])+$|(?:\\\\)\s*$"), ""),
    (re.compile(r"^(-?\d{1,3}(?: \d{3})+)(?=(?:\.\d+)?$)"), lambda match: match[0].replace(" ", "")),
    (
        re.compile(
            r"\\(sin|cos|tan|cot|sec|csc)\s*(?:\{|\()?\s*(\d{1,4})\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?:\}|\))?"
        ),
        r"\\\1\\left(\\frac{\2\\pi}{180}\\right)",
    ),
    (
        re.compile(r"^(?=\])\]([^\[\]()]+[,;][^\[\]()]+)([\[\]])$"),
        lambda match: f"({match[1]}{')' if match[2] == '[' else ']'}",
    ),
    (re.compile(r"^\[([^\[\]()]+[,;][^\[\]()]+)\[$"), r"[\1)"),
    (re.compile(r"(?<=[)\]}])\s*U\s*(?=[(\[]|\\\{)"), r"\\cup "),
    (re.compile(r"\\lbrack(?![A-Za-z])"), "["),
    (re.compile(r"\\rbrack(?![A-Za-z])"), "]"),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"\\not\s*="), r"\\ne "),
    (re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]"), r"\\\\ "),
    (re.compile(r"\\(?:tag|label)\s*\{[^{}]*\}"), ""),
    (re.compile(r"\\(?:dots|ldots|cdots)(?![A-Za-z])"), r"\\dots"),
)
"""Colours, sizes and other names of the same symbol: a pattern, and its replacement."""

_INFIX = re.compile(r"\\(over|choose|atop)(?![A-Za-z])")
_SIDES = "=<>,;"
_TEXT_OF_REALS = re.compile(
    r"\\(?:text|mathrm|mbox)\s*\{(\s*(?:the\s+set\s+of\s+)?(?:all|any|every)\s+reals?[^{}]*)\}", re.IGNORECASE
)
_WORDS_FOR_REALS = re.compile(
    r"^(?:the\s+set\s+of\s+)?(?:all|any|every)\s+real\s+(?:numbers?|values?)(?:\s+(?:of\s+)?[a-z](?![A-Za-z]))?|^all\s+reals(?![A-Za-z])",
    re.IGNORECASE,
)
_EXCEPT = re.compile(
    r"(\\mathbb\{R\})\s*,?\s*(?:\\text\s*\{\s*)?(?:except|other\s+than|excluding|without|but\s+not|such\s+that|where|with)"
    r"\s*(?:for\s+|when\s+)?\}?",
    re.IGNORECASE,
)
_INVISIBLE = re.compile(
    r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr)(?![A-Za-z])\.?|\\(?:displaystyle|textstyle|limits|phantom)(?![A-Za-z])"
    r"|\\[!,;:>]|\\(?:quad|qquad)(?![A-Za-z])|(?<!\\)\\ |~|(?<!\\)\$"
)
_GROUPED = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,|\\ |\\!,|\{,\}\\!)\s*+(?=\d{3}(?!\d))")
_JOINER = re.compile(r"\\(?:text|mbox|textrm|textnormal|mathrm)\s*\{\s*(?=[,oa])(,?)\s*(or|and|)\s*\}")
_FONT = re.compile(  # for one letter, but `5\text{m}` has a unit
    r"(?!(?<=[\d}\s,;~!/])\\(?:text|mathrm|mbox)\s*\{[ghlmsACFJKLNVW]\})\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|boldsymbol|mathcal|mbox|bf|rm)\s*\{([A-Za-z])\}"
)
_WRAPPED = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|it|rm|sf)|mbox|boldsymbol|underline)\s*\{([^{}]*)\}"
)
_ARRAY = re.compile(r"[(\[]\s*\\begin\{array\}\s*\{[clr|\s]*\}(.*?)\\end\{array\}\s*[)\]]")
_ROW = re.compile(r"\[\s*([^\[\]()]*,[^\[\]()]*)\]")
_ROWS = re.compile(r"\s*\[\s*\[[^\[\]()]*,[^\[\]()]*\](?:\s*,\s*\[[^\[\]()]*,[^\[\]()]*\])+\s*\]\s*")
"""A matrix as a list of its rows, `[[1, 2], [3, 4]]`."""

_MONEY_TEXT = re.compile(r"\\(?:text(?:rm|bf|it|sf|normal)?|mathrm|mbox)\s*\{[^{}]*\}")
_ASCII_NAMES = {"inf": "infty", "infinity": "infty", "oo": "infty"}
_ASCII_NAME = re.compile(
    r"(?<![A-Za-z\\])(?:(sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp)(?=\s*\()|(pi|infinity|inf|oo)(?![A-Za-z]))"
)
_EXPONENT = re.compile(r"\^\s*(?=\()|\\exp\s*(?=[({])")
_TYPED = re.compile(
    r"\^\s*\(|\\exp(?![A-Za-z])|\*\*"
    r"|(?<![A-Za-z\\])(?:sqrt|pi|inf|oo|exp|log|ln|(?:arc)?(?:sin|cos|tan)|cot|sec|csc)"
)
_CONDITION = re.compile(
    r"^\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid(?![A-Za-z])|[|:])\s*(?=[^{}]*\1)([^{}]*)\\\}$"
)
"""A set by its condition, `\\{x \\mid x > 2\\}`."""
_WORDY = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_NO_SOLUTION = re.compile(
    r"^(?:there\s+(?:is|are)\s+)?no\s+(?:real\s+)?solutions?(?:\s+exists?)?\.?$|^(?:the\s+)?empty\s+set$", re.IGNORECASE
)
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])", re.ASCII)
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
_DEGREES = re.compile(r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree)\s*([CF]|\\text\{\s*[CF]\s*\})?\s*$")
_GROUP = r"\\(?:text(?:rm|bf|it|sf|normal)?|math(?:rm|bf|it|sf)|mbox|rm|bf)\s*+\{((?:[^{}]|\{[^{}]*+\})*+)\}"
_POWER_OF_UNIT = r"\^\s*+(?:\d|\{\s*+-?\d\s*+\})"
# What may be the unit after a quantity: pieces of text, or plain words.
_TEXT_TAIL = re.compile(rf"\s*+{_GROUP}(?:\s*+(?:{_GROUP}|{_POWER_OF_UNIT}|/|\\cdot(?![A-Za-z])))*+\s*+$")
_WORD_TAIL = re.compile(
    rf"(?<![A-Za-z\\µμ])(?:\s*+(?:[A-Za-zµμ]++|[＄€£¥₹¢]|{_POWER_OF_UNIT}|[./'’-]|\*(?!\*)|\\cdot(?![A-Za-z])))++\s*+$"
)
_UNIT_FRACTION = re.compile(
    rf"(?<=[\d}}\s,;!])\\frac\{{\s*({_GROUP}(?:{_POWER_OF_UNIT})?)\s*\}}\{{\s*({_GROUP}(?:{_POWER_OF_UNIT})?)\s*\}}\s*$"
)
_ORDINAL = re.compile(r"(?<=\d)\s*(?:\^\s*)?\{?(?:\\(?:text|mathrm|mbox)\s*\{)?\s*(?:st|nd|rd|th)\s*\}*$")
_MONEY = re.compile(r"^(-?)\s*([＄£€¥₹])\s*(?=[-.\d\\({])")
_USD = re.compile(r"^(-?)\s*\\text\{\s*(?:USD|US\s*＄)\s*\}")
_APPROXIMATE = re.compile(r"^\s*(?:\\approx|≈|\\text\{\s*(?:about|approximately)\s*\}|about |approximately )\s*")


class Measure(NamedTuple):
    """A quantity, separated into number and unit."""

    body: str
    """The number or formula."""
    percent: bool
    """Has a percent sign."""
    unit: str
    """Unit in one spelling, `#noun` for a counted thing; empty: unknown or none."""
    approximate: bool
    """Has a sign or word for "approximately"."""


@lru_cache(maxsize=8192)
def clean(text: str) -> str:
    r"""Normalise LaTeX: `\dfrac12` and `\tfrac 1 2` to `\frac{1}{2}`, `10{,}000` to `10000`; remove sizes."""
    text = (
        plain_characters(with_roots(periodic(endless(with_bases(spelled(text.strip()))))))
        .replace("\n", " ")
        .replace(r"\lbrace", r"\{")
        .replace(r"\rbrace", r"\}")
    )
    text = _without_styles(text)
    text = _UNIT_FRACTION.sub(r"\1/\3", _GROUPED.sub("", _with_money(text)))
    text = re.sub(r"\\cdot(?=\\)", r"\\cdot ", text)
    text = _FRACTION.sub(r"\\frac", _JOINER.sub(r"\1 \2 ", _FONT.sub(r"\1", text)))
    text = _INVISIBLE.sub(" ", text).replace("\\text{ }", " ")
    if _ROWS.fullmatch(text):
        rows = r"\\".join(row.replace(",", "&") for row in _ROW.findall(text))
        text = rf"\begin{{pmatrix}}{rows}\end{{pmatrix}}"
    text = re.sub(r"\\(leq|geq)slant(?![A-Za-z])", r"\\\1 ", _ARRAY.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text))
    text = braced(_typed(text)).strip().rstrip(".").strip().replace(r"\varnothing", r"\emptyset")
    if wrapped := _WRAPPED.fullmatch(text):
        text = wrapped[1].strip()
    while text.startswith("{") and text.endswith("}") and _argument(text, 0)[1] == len(text):
        text = text[1:-1].strip()
    text = _NO_SOLUTION.sub(r"\\emptyset", text)
    text = re.sub(r"^\\\{\s*\\\}$", r"\\emptyset", _CONDITION.sub(r"\2", text))
    return re.sub(r"^(?:[A-Za-z]\s*\\in\s*)?\\mathbb\s*(?:R|\{R\})$", r"(-\\infty,\\infty)", text)


def plain_characters(text: str) -> str:
    r"""Turn Unicode into LaTeX: `x₁` into `x_{1}`, `10⁻³` into `10^{-3}`, `½` into `\frac{1}{2}`, `１２` into `12`."""
    if text.isascii():
        return text
    text = _OVERLINED.sub(lambda match: rf"\overline{{{match[0].replace(chr(0x305), '')}}}", text)
    text = _RAISED_RUN.sub(lambda match: f"^{{{''.join(map(_RAISED.__getitem__, match[0]))}}}", text)
    text = _LOWERED_RUN.sub(lambda match: f"_{{{''.join(map(_LOWERED.__getitem__, match[0]))}}}", text)
    text = _MICRO.sub("\0", text)
    text = "".join([character if character < "\x80" else _plain_character(character) for character in text])
    return text.replace("\0", "µ")


@lru_cache(maxsize=4096)
def _plain_character(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    if character in _UNIT_SIGNS:
        return character
    if character.isdecimal():  # of any script
        return str(unicodedata.decimal(character))
    plain = unicodedata.normalize("NFKC", character)
    if fraction := re.fullmatch("(\\d)\u2044(\\d{1,2})", plain):
        return rf"\frac{{{fraction[1]}}}{{{fraction[2]}}}"
    return "".join(rf"\{_GREEK[letter]} " if letter in _GREEK else letter for letter in plain)


def _without_styles(text: str) -> str:
    r"""Remove colours and sizes; turn `{3 \over 4}` into `\frac{3}{4}`, `{5 \choose 2}` into `\binom{5}{2}`."""
    for pattern, replacement in _STYLES:
        text = pattern.sub(replacement, text)
    if "\\" in text:
        for _ in range(_MAX_INFIX):
            infix = _INFIX.search(text)
            if infix is None:
                break
            start, end = _group_around(text, infix.start(), infix.end())
            command = {"over": "frac", "choose": "binom", "atop": "atop "}[infix[1]]
            over, under = text[start : infix.start()].strip(), text[infix.end() : end].strip()
            text = rf"{text[:start]}\{command}{{{over}}}{{{under}}}{text[end:]}"
    text = _WORDS_FOR_REALS.sub(r"\\mathbb{R}", _TEXT_OF_REALS.sub(r"\1", text).strip())
    return _EXCEPT.sub(r"\1 except ", text) if r"\mathbb" in text else text


def _group_around(text: str, start: int, end: int) -> tuple[int, int]:
    """Start and end of the operands of an infix command: the content of the brackets around it, or a side."""
    depth = 0
    while start > 0:
        character = text[start - 1]
        depth += (character in ")]}") - (character in "([{")
        if depth < 0 or (depth == 0 and character in _SIDES):
            break
        start -= 1
    depth = 0
    while end < len(text):
        depth += (text[end] in "([{") - (text[end] in ")]}")
        if depth < 0 or (depth == 0 and text[end] in _SIDES):
            break
        end += 1
    return start, end


def _with_money(text: str) -> str:
    r"""Replace `\$`, and any dollar in `\text{}`, by `DOLLAR`: the others only delimit a formula."""
    if "$" not in text:
        return text
    text = _MONEY_TEXT.sub(lambda match: match[0].replace(r"\$", DOLLAR).replace("$", DOLLAR), text)
    return re.sub(rf"\\text\s*\{{\s*({DOLLAR})\s*\}}", r"\1", text.replace(r"\$", DOLLAR))


def _typed(text: str) -> str:
    r"""Turn plain-text mathematics into LaTeX: `2*sqrt(3)`, `x**2`, `exp(2x)`, `x^(1/2)`, `pi`, `inf`."""
    if not _TYPED.search(text):
        return text
    text = _ASCII_NAME.sub(lambda match: f"\\{match[1] or _ASCII_NAMES.get(match[2], match[2])} ", text)
    text = text.replace("**", "^")
    parts, start = [], 0
    for match in _EXPONENT.finditer(text):
        if match.start() >= start:
            argument, end = _argument(text, match.end())
            parts += [text[start : match.start()], "^{" if match[0][0] == "^" else "e^{", _typed(argument), "}"]
            start = end
    return "".join([*parts, text[start:]])


def braced(text: str) -> str:
    r"""Add braces around each argument of `\frac` and `\sqrt`: `\frac1{2}`, `\frac 3 8`, `\sqrt3`, `\sqrt(3)`."""
    parts, start = [], 0
    for match in re.finditer(r"\\(frac|sqrt)(?![A-Za-z])\s*(\[[^\]]*\])?", text):
        if match.start() < start:
            continue
        end = match.end()
        parts += [text[start : match.start()], f"\\{match[1]}{match[2] or ''}"]
        for _ in range(2 if match[1] == "frac" else 1):
            argument, end = _argument(text, end)
            parts.append("{" + braced(argument) + "}")
        start = end
    return "".join([*parts, text[start:]])


def _argument(text: str, at: int) -> tuple[str, int]:
    """The argument that TeX would read at a position, or the content of parentheses there, and where it ends."""
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
    """Remove white space and its equivalents, except between digits: `4 2` is not 42."""
    return re.sub(r"(?<!\d) | (?!\d)", "", " ".join(text.replace(DOLLAR, "").split())).rstrip(".")


def mask(text: str) -> str:
    """The text with brackets and their content masked, at its original length."""
    characters, depth = [], 0
    for character in text:
        if character in "([{":
            depth += 1
        characters.append("\0" if depth > 0 else character)
        if character in ")]}":
            depth = max(0, depth - 1)
    return "".join(characters)


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """The text between separators that are outside of all brackets, without white space around."""
    parts, start = [], 0
    for match in separator.finditer(mask(text)):
        parts.append(text[start : match.start()].strip())
        start = match.end()
    return [*parts, text[start:].strip()]


def with_thousands(text: str) -> list[str]:
    """Both readings of `1,234`, a number or a list of two; in brackets it is always a list."""
    joined = list(text)
    for match in _THOUSANDS.finditer(mask(text)):
        for position in range(*match.span()):
            joined[position] = joined[position].replace(",", "")
    number = "".join(joined)
    return [text] if number == text else [number, text]


def words(text: str) -> str | None:
    """The text in lower case and single spaces, if it is words rather than mathematics; else None.

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
    r"""Split a quantity into its number or formula and `\approx`, `\$`, `\%`, `^\circ`, `\text{ cm}^2`, `apples`.

    Only known units and nouns are removed. `42 million` is 42000000; `5\text{ minus one}` stays as it is.
    """
    text, approximate = _APPROXIMATE.subn("", text)
    text, unit = _without_money(text.strip())
    percent = False
    for _ in range(3):  # `5\text{ cm}^2.`, `50\%\text{ of it}`
        previous = text
        text = _ORDINAL.sub("", text)
        text, removed_unit = _without_unit(text)
        unit = removed_unit or unit
        shorter = _PERCENT.sub("", text)
        percent, text = percent or shorter != text, shorter
        if degrees := _DEGREES.search(text):
            scale = re.sub("[^CF]", "", (degrees[1] or "").replace(r"\text", ""))
            unit, text = f"deg{scale}", text[: degrees.start()]
        text = text.strip().rstrip(".")
        if text == previous:
            break
    return Measure(text, percent, unit, bool(approximate))


def _without_money(text: str) -> tuple[str, str]:
    """Remove a leading currency sign; returns the text and the currency."""
    if money := _MONEY.match(text):
        return text[: money.end(1)] + text[money.end() :], known_unit(money[2], True) or ""
    if usd := _USD.match(text):
        return text[: usd.end(1)] + text[usd.end() :].strip(), "$"
    return text, ""


def _without_unit(text: str) -> tuple[str, str]:
    """Remove the unit or noun at the end; returns the text and that unit. A scale ("million") is multiplied."""
    for pattern in (_TEXT_TAIL, _WORD_TAIL):
        tail = pattern.search(text)
        if not tail or tail.start() == 0 or not re.search("[A-Za-z＄€£¥₹¢]", tail[0]):
            continue
        is_text = pattern is _TEXT_TAIL
        phrase, body = re.sub(_GROUP, r" \1 ", tail[0]) if is_text else tail[0], text[: tail.start()].strip()
        body, phrase = _scaled(body, phrase.strip(" ~"))
        if not phrase.strip(" .,"):
            return body, ""
        known = known_unit(phrase, is_text)
        if known is not None:
            return body, known
        counted = noun(phrase) if is_text or tail[0][0].isspace() else None
        if counted is not None:
            return body, f"#{counted}"
    return text, ""


def without_letters(text: str, unit: str) -> str:
    """Remove the letters at the end if they are the abbreviation of this unit: `5 m^{2}` for `m^2`.

    Letters outside of `\\text{}` may be unknowns, so that only a unit that is expected is read in them.
    """
    tail = _WORD_TAIL.search(text)
    return text[: tail.start()].strip() if tail and known_unit(tail[0], True) == unit else text


def _scaled(body: str, phrase: str) -> tuple[str, str]:
    """Multiply a plain number by the "million" that follows it; returns it and the remaining text."""
    while phrase:
        word, _, rest = phrase.partition(" ")
        scale, value = SCALES.get(word.lower().removesuffix("s").rstrip(".")), number(body)
        if scale is None or value is None:
            break
        body, phrase = str(value[0] * scale), rest.strip()
    return body, phrase


@lru_cache(maxsize=8192)
def number(text: str) -> tuple[Fraction, int] | None:
    r"""The exact value of a plain number, and its number of decimals; None for all else.

    Recognized are `-1.50`, `3/4`, `\frac{3}{4}`, mixed numbers (`3\frac{1}{2}`, `3 1/2`), `1.5 \times 10^{3}` and
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
        decimals = len(plain["left"].partition(".")[2]) if not plain["right"] else 0
        return (_signed(plain["sign"], Fraction(plain["left"]) / under), decimals) if under else None
    if frac := _FRAC.fullmatch(text):
        return _fraction(frac, 0)
    if match := _SCIENTIFIC.fullmatch(text):
        mantissa, exponent = match["left"] or match["eleft"] or "1", int(match["exponent"] or match["eexponent"])
        return _signed(match["sign"] or match["esign"] or "", Fraction(mantissa) * Fraction(10) ** exponent), 0
    if match := _REPEATING.fullmatch(text):
        period = match["period"] or match["digit"]
        tail = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(match["fixed"]))
        return _signed(match["sign"], Fraction(f"{match['whole'] or 0}.{match['fixed']}0") + tail), 0
    return None


def _fraction(match: re.Match[str], decimals: int) -> tuple[Fraction, int] | None:
    under = int(match["under"])
    if not under:
        return None
    part = Fraction(match["over"]) / under
    if match["whole"] and part < 0:
        return None
    return _signed(match["sign"], int(match["whole"] or 0) + part), decimals


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value
