"""Plain numbers with their affixes: `\\$32,\\!348`, `90^\\circ`, `5.4 \\text{ cents}`, `52_8`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from rlcli_audit.values import decimal, differ, number, thousands

Named = tuple[str, str]
"""The change to an answer, and its result: `("off by one", "43")`."""

_SUFFIX = r"\s*(?:\\?%|\^\{?\\circ\}?|\s*\\(?:text|mbox|textrm|mathrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?|_\{?\d{1,2}\}?)?"
_QUANTITY = re.compile(rf"(?P<prefix>(?:\\?\$)?\s*)(?P<core>.*?)(?P<suffix>{_SUFFIX})", re.DOTALL)
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
MINUS = "−"


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its affixes."""

    prefix: str
    """Text before the number, such as a dollar sign."""
    core: str
    """The number as written."""
    suffix: str
    """Text after it, such as a unit, or the base of `52_8`."""
    value: Fraction
    """Its value; for a number in another base, that of its digits read in base ten."""

    @property
    def in_base(self) -> bool:
        return self.suffix.strip().startswith("_")

    def with_value(self, value: Fraction) -> str | None:
        """Another number with the same affixes and in the same notation; None if that is impossible."""
        if "frac" in self.core or "/" in self.core:
            over, under = abs(value.numerator), value.denominator
            written = f"\\frac{{{over}}}{{{under}}}" if "frac" in self.core else f"{over}/{under}"
            core = f"{'-' if value < 0 else ''}{written}"
        else:
            core = decimal(value) or ""
        return f"{self.prefix}{core}{self.suffix}" if core else None


def quantity(text: str) -> Quantity | None:
    r"""`text` as a number with affixes; None if it is something else.

    >>> quantity(r"5.4 \text{ cents}").value, quantity("52_8").in_base, quantity("x+1")
    (Fraction(27, 5), True, None)
    """
    match = _QUANTITY.fullmatch(text.strip())
    value = number(match["core"]) if match else None
    if match is None or value is None:
        return None
    result = Quantity(match["prefix"], match["core"].strip(), match["suffix"], value)
    return None if result.in_base and not re.fullmatch(r"[0-9]+", result.core) else result


def wrong(known: Quantity) -> Iterator[Named]:
    """Other numbers, none of them equal to this one in any reading."""
    if known.in_base:
        digits = known.core
        yield "off by one digit", known.prefix + digits[:-1] + ("1" if digits[-1] == "0" else "0") + known.suffix
        yield "digits appended", known.prefix + digits + "1" + known.suffix
        return
    value = known.value
    others = [
        ("off by one", known.with_value(value + 1)),
        ("off by one digit", _digit_changed(known)),
        ("sign flipped", known.with_value(-value)),
        ("a half more", known.with_value(value + Fraction(1, 2))),
    ]
    if re.fullmatch(r"-?[0-9]+", known.core):
        others += [("digits appended", f"{known.prefix}{known.core}7{known.suffix}")]
        if len(known.core.lstrip("-")) > 1:
            others += [("digit dropped", f"{known.prefix}{known.core[:-1]}{known.suffix}")]
    for kind, text in others:
        parsed = quantity(text) if text else None
        if text and parsed and differ(value, parsed.value):
            yield kind, text


def tricks(known: Quantity) -> Iterator[Named]:
    """Other numbers that look like this one, or become equal to it when their characters are simplified."""
    digits = known.core
    if known.in_base or not re.fullmatch(r"[0-9]{2,9}", digits):
        return
    base, power = int(digits[:-1]), int(digits[-1])
    if base**power != known.value:
        yield "raised digit", known.prefix + digits[:-1] + digits[-1].translate(_RAISED) + known.suffix
    yield "Unicode minus", known.prefix + MINUS + digits + known.suffix


def plain_equivalents(known: Quantity) -> Iterator[Named]:
    """Other ways to write this number without LaTeX."""
    plain = decimal(known.value)
    if plain is None or known.in_base or known.suffix.strip().endswith("%"):
        return
    yield "plain digits", plain
    yield "trailing zeros", plain + ("0" if "." in plain else ".00")
    if known.value.denominator == 1 and abs(known.value) >= 1000:
        yield "thousands separators", thousands(int(known.value))
    if not known.suffix.strip() or known.prefix.strip():
        if known.value >= 0:
            yield "dollar sign", f"${plain}"
        if not known.prefix.strip():
            yield "unit", f"{plain} units"


def _digit_changed(known: Quantity) -> str | None:
    """The number with its first digit other than 0 changed."""
    match = re.search(r"[1-9]", known.core)
    if match is None:
        return None
    digit = str(int(match[0]) % 9 + 1)
    return known.prefix + known.core[: match.start()] + digit + known.core[match.end() :] + known.suffix
