r"""Numerals in special forms: a base in words, repeating decimals with dots, roots typed as `√17`, residues."""

from __future__ import annotations

import re

from rlcli_verifiers.answers import is_blank

_TO_NINETEEN = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_UNITS = {name: value for value, name in enumerate(_TO_NINETEEN.split())}
_TO_NINETY = "twenty thirty forty fifty sixty seventy eighty ninety"
_TENS = {name: 10 * i for i, name in enumerate(_TO_NINETY.split(), 2)}
_BASES = {name: value for name, value in _UNITS.items() if 2 <= value <= 16}
_BASES |= {"binary": 2, "octal": 8, "decimal": 10, "hexadecimal": 16, "hex": 16}
_WORD = "|".join(sorted(_BASES, key=len, reverse=True))
_TEXT = r"\\(?:text(?:rm|bf|it|normal)?|math(?:rm|bf)|mbox)\s*"
_BASE = rf"\(?\s*(?:base\s+)?({_WORD}|\d{{1,2}})\s*\)?\s*"
_SUBSCRIPT = re.compile(
    rf"_\s*(?:\{{\s*{_TEXT}\{{\s*{_BASE}\}}\s*\}}|{_TEXT}\{{\s*{_BASE}\}}|\{{\s*{_BASE}\}})", re.IGNORECASE
)
_IN_BASE = re.compile(
    rf"(?<=[0-9A-F)])\s*(?:{_TEXT}\{{)?\s*\(?\s*(?:in\s+)?base[\s-]+\}}?\s*\$?(\d{{1,2}}|{_WORD})\$?\s*\)?\s*\}}?(?!\s*\d)",
    re.IGNORECASE,
)
BASE_AFTER = re.compile(rf"\s*\(?\s*(?:in\s+)?base[\s-]+\$?(?:\d{{1,2}}|{_WORD})\$?\s*\)?", re.IGNORECASE)
"""The base after a numeral in prose."""

_UPRIGHT = re.compile(rf"{_TEXT}\{{\s*([0-9A-F]+)\s*\}}(?=\s*_)")
_HEXADECIMAL = re.compile(r"(?<![A-Za-z\\{])[0-9a-f]+(?=_\{?16)")
_PREFIX = re.compile(r"0(?P<kind>[xb])(?P<digits>[0-9A-Fa-f]+)")

_DOTS = r"(?:…|\.\s?\.\s?\.|\\(?:l|c)?dots(?![A-Za-z]))"
_ENDLESS = re.compile(rf"(?<![\d.])(?P<whole>\d{{0,15}})\.(?P<digits>\d{{2,24}})\s?{_DOTS}(?!\s?\d)", re.ASCII)
_DOTTED = re.compile(
    r"(?<![\d.])(?P<whole>\d{0,15})\.(?P<fixed>\d{0,12})(?:"
    r"\\dot\s*\{?\s*(?P<one>\d)\s*\}?(?:(?P<middle>\d{0,12})\\dot\s*\{?\s*(?P<last>\d)\s*\}?)?"
    r"|\((?P<round>\d{1,12})\)(?!\s*[(\d^]))",
    re.ASCII,
)
_PARTS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10}
_SPELLED = re.compile(
    r"(?:\\(?:text(?:bf|rm|it|normal)?|mathrm|mbox)\s*\{)?\s*([A-Za-z]{3,9}(?:[ -]+[A-Za-z]{3,9}){0,5})\s*\.?\s*\}?\.?"
)
_ROOT_OF_DIGITS = re.compile(r"(?<![A-Za-z\\])sqrt\s*(\d+(?:\.\d+)?)")

_UNICODE_ROOT = re.compile(r"([√∛∜])\s?(\d+(?:\.\d+)?)")
_RESIDUE = re.compile(
    r"(?P<value>.*?)\s*(?:\\pmod\s*\{?\s*(?P<pmod>\d{1,9})\s*\}?|\\(?:bmod|mod)\s*\{?\s*(?P<bmod>\d{1,9})\s*\}?"
    r"|\(\s*(?:\\(?:bmod|mod)|\\(?:text|mathrm)\s*\{\s*mod\s*\}|mod)\s*~?\s*(?P<bracketed>\d{1,9})\s*\)"
    r"|(?:\\(?:text|mathrm)\s*\{\s*mod\s*\}|(?<![A-Za-z])mod)\s+(?P<word>\d{1,9}))",
    re.DOTALL,
)
_RESIDUE_VALUE = re.compile(r"(?:[A-Za-z]\s*(?:\\equiv|≡|=)\s*)?(?P<residue>\d{1,9})")


def with_bases(text: str) -> str:
    r"""Write the base of a numeral as a subscript of digits.

    >>> with_bases(r"4343_{\text{six}}"), with_bases(r"101\text{ (base 2)}"), with_bases("0x2f")
    ('4343_{6}', '101_{2}', '2F_{16}')
    """
    if prefixed := _PREFIX.fullmatch(text.strip()):
        return f"{prefixed['digits'].upper()}_{{{16 if prefixed['kind'] == 'x' else 2}}}"
    if "_" in text:
        text = _HEXADECIMAL.sub(lambda match: match[0].upper(), text)
        text = _UPRIGHT.sub(r"\1", _SUBSCRIPT.sub(_as_subscript, text))
    return _IN_BASE.sub(_as_subscript, text) if "ase" in text else text


def _as_subscript(match: re.Match[str]) -> str:
    name = next(filter(None, match.groups())).lower()
    return f"_{{{_BASES.get(name, name)}}}"


def endless(text: str) -> str:
    r"""Write decimals that repeat without end as fractions: `0.1666…` as `\frac{15}{90}`.

    Dots need two periods before them: `0.16…` may continue in any way.

    >>> endless("x = 0.555..."), endless("3.14…"), endless("0.142857142857…")
    ('x = \\frac{5}{9}', '3.14…', '\\frac{142857}{999999}')
    """
    return _ENDLESS.sub(_repeating, text) if any(dots in text for dots in ("…", "..", ". .", "dots")) else text


def periodic(text: str) -> str:
    r"""Write decimals with a marked period as fractions, `0.1\dot{6}` and `0.1(6)`; `\overline` is read elsewhere.

    >>> periodic(r"0.\dot{1}4285\dot{7}"), periodic("0.1(6)")
    ('\\frac{142857}{999999}', '\\frac{15}{90}')
    """
    return _DOTTED.sub(_dotted, text) if r"\dot" in text or ".(" in text or ")" in text[-1:] else text


def _repeating(match: re.Match[str]) -> str:
    digits = match["digits"]
    covered = {period: _covered(digits, period) for period in range(1, len(digits) // 2 + 1)}
    best = max(covered, key=lambda period: (covered[period], -period))
    if covered[best] < 2 * best:
        return match[0]
    start = len(digits) - covered[best]
    return _fraction(match["whole"], digits[:start], digits[start : start + best])


def _covered(digits: str, period: int) -> int:
    """Number of digits at the end that have this period."""
    length = period
    while length < len(digits) and digits[-length - 1] == digits[-length - 1 + period]:
        length += 1
    return length


def _dotted(match: re.Match[str]) -> str:
    period = match["round"] or match["one"] + (match["middle"] or "") + (match["last"] or "")
    return _fraction(match["whole"], match["fixed"], period)


def _fraction(whole: str, fixed: str, period: str) -> str:
    under = (10 ** len(period) - 1) * 10 ** len(fixed)
    over = int(f"{whole}{fixed}{period}") - int(f"{whole}{fixed}" or "0")
    return str(over // under) if over % under == 0 else rf"\frac{{{over}}}{{{under}}}"


def with_roots(text: str) -> str:
    r"""Give the root sign all digits that follow it: `√17` is `\sqrt{17}`, where `\sqrt 17` is `\sqrt{1}7`."""
    return _ROOT_OF_DIGITS.sub(r"\\sqrt{\1}", _UNICODE_ROOT.sub(r"\1{\2}", text))


def spelled(text: str) -> str:
    r"""Digits for a text that is nothing but a number in words; any other text as it is.

    >>> spelled(r"\text{twenty-one}"), spelled("one hundred five"), spelled("two thirds"), spelled("five apples")
    ('21', '105', '\\frac{2}{3}', 'five apples')
    """
    match = _SPELLED.fullmatch(text)
    if match is None:
        return text
    names = [name for name in re.split("[ -]+", match[1].lower()) if name != "and" or "hundred" in match[1].lower()]
    part = _PARTS.get(names[-1]) or _PARTS.get(names[-1].removesuffix("s")) or (2 if names[-1] == "halves" else None)
    value = _whole([name for name in (names[:-1] if part else names) if name != "and"])
    if value is None:
        return text
    return rf"\frac{{{value}}}{{{part}}}" if part else str(value)


def _whole(names: list[str]) -> int | None:
    """The whole number below a million that these words spell."""
    total, group, last = 0, 0, 10**9
    for name in names:
        if name in ("hundred", "thousand"):
            scale = 100 if name == "hundred" else 1000
            if not 0 < group < scale or (scale == 1000 and total):
                return None
            total, group = (total + group * scale, 0) if scale == 1000 else (total, group * 100)
            last = scale
            continue
        value = _UNITS.get(name, _TENS.get(name))
        size = 100 if name in _TENS else 10 if value is not None and value < 10 else 20
        if value is None or last not in (10**9, 1000, 100, *([20_000] if value < 10 else [])):
            return None
        group, last = group + value, 20_000 if size == 100 else 1
    return total + group if names else None


def without_modulus(text: str) -> tuple[str, int]:
    r"""The residue of `x \equiv 3 \pmod{7}` or `3 \bmod 7` and its modulus; the text and 0 if it is none.

    `10 \bmod 7` is no residue: it stays as it is.
    """
    match = _RESIDUE.fullmatch(text.strip()) if "mod" in text else None
    residue = _RESIDUE_VALUE.fullmatch(match["value"].strip()) if match else None
    if match is None or residue is None or is_blank(match["value"]):
        return text, 0
    modulus = int(match["pmod"] or match["bmod"] or match["bracketed"] or match["word"])
    is_reduced = int(residue["residue"]) < modulus
    return (residue["residue"], modulus) if is_reduced else (text, 0)
