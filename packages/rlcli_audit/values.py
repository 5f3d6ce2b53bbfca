"""Exact comparison of numbers, independent of any verifier, so that the expected verdicts of probes are certain."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 60
"""Maximum number of characters of a number that is read."""

_INTEGER = r"\d{1,3}(?:(?:,\\!\s?|\{,\}|,)\d{3})+(?![\d,])|\d+"
_DECIMAL = rf"(?:(?P<whole>{_INTEGER})?(?P<point>\.\d+)|(?P<integer>{_INTEGER}))"
_OVER, _UNDER = (rf"(?:\{{\s*(?P<{name}>\d+)\s*\}}|(?P<{name}1>\d))" for name in ("over", "under"))
_FRACTION = rf"(?P<mixed>\d+\s*)?\\[dt]?frac\s*{_OVER}\s*{_UNDER}"
_NUMBER = re.compile(rf"(?P<sign>-?)\s*(?:{_FRACTION}|(?P<left>\d+)\s*/\s*(?P<right>\d+)|{_DECIMAL})", re.ASCII)


def number(text: str) -> Fraction | None:
    r"""The value of a plain number, exactly; None for anything else, and in case of doubt.

    >>> [str(number(text)) for text in ("-1,234.50", r"\frac{3}{4}", r"1\frac45", "10,\\!080", "3/6", "1,23", "2x")]
    ['-2469/2', '3/4', '9/5', '10080', '1/2', 'None', 'None']
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or sum(map(str.isdigit, text)) > MAX_DIGITS:
        return None
    value = _fraction(match)
    return -value if value is not None and match["sign"] else value


def _fraction(match: re.Match[str]) -> Fraction | None:
    over, under = match["over"] or match["over1"], match["under"] or match["under1"]
    if over is None:
        over, under = match["left"], match["right"]
    if over is not None:
        if int(under) == 0 or (match["mixed"] and int(over) >= int(under)):
            return None
        return Fraction(int(over), int(under)) + int(match["mixed"] or 0)
    digits = re.sub(r"\D", "", match["integer"] or match["whole"] or "0")
    return Fraction(f"{digits}{match['point'] or ''}")


def differ(value: Fraction, other: Fraction) -> bool:
    """True if the values differ in every reading: a verifier may read a percentage as its hundredth."""
    return other not in (value, value * 100, value / 100)


def decimal(value: Fraction) -> str | None:
    """`value` as a decimal number if it is finite, else None.

    >>> decimal(Fraction(3, 40)), decimal(Fraction(-7)), decimal(Fraction(1, 3))
    ('0.075', '-7', None)
    """
    rest, digits = value.denominator, 0
    for prime in (2, 5):
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        digits = max(digits, power)
    if rest != 1 or digits > 12:
        return None
    scaled = abs(value.numerator) * 10**digits // value.denominator
    integer, part = divmod(scaled, 10**digits)
    return f"{'-' if value < 0 else ''}{integer}" + (f".{part:0{digits}d}" if digits else "")


def thousands(value: int, separator: str = ",") -> str:
    """`value` with a separator between thousands: 1,234,567."""
    return f"{value:,}".replace(",", separator)
