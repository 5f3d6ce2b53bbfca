"""Values of a dataset's rows as the text that a person would write."""

from __future__ import annotations

import math
from datetime import date, datetime, time
from decimal import Decimal

MOST_DIGITS = 40
"""Digits before or after the point, from which on a number keeps its exponent."""


def value_text(value: object) -> str | None:
    """The text of a number, a boolean, a date or a time; None for any other value, and for a number that is not finite.

    A fixed-point number loses the zeros at its end, which stem from its column's type; midnight without a time zone is
    a date.

    >>> [value_text(value) for value in (7, 4.0, 1e-7, Decimal("2.50"), True, date(2024, 5, 1), float("nan"))]
    ['7', '4', '0.0000001', '2.5', 'true', '2024-05-01', None]
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _decimal_text(Decimal(repr(value))) if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return _decimal_text(value) if value.is_finite() else None
    if isinstance(value, datetime):
        at_midnight = value.tzinfo is None and value.time() == time()
        return value.date().isoformat() if at_midnight else value.isoformat(sep=" ")
    return value.isoformat() if isinstance(value, date | time) else None


def _decimal_text(value: Decimal) -> str:
    if not value:
        return "0"
    if abs(value.adjusted()) > MOST_DIGITS:
        return str(value)
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
