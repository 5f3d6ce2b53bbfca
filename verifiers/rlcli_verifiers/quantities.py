"""Compare quantities in different units, times of day, dates and ratios, exactly."""

from __future__ import annotations

import re
from fractions import Fraction

from rlcli_verifiers.units import unit as known_unit

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_FACTORS = {
    "m": "1 L", "cm": "1/100 L", "mm": "1/1000 L", "dm": "1/10 L", "km": "1000 L", "um": "1/1000000 L",
    "in": "254/10000 L", "ft": "3048/10000 L", "yd": "9144/10000 L", "mi": "1609344/1000 L",
    "s": "1 T", "ms": "1/1000 T", "min": f"{_MINUTE} T", "h": f"{_HOUR} T", "day": f"{_DAY} T", "week": f"{7 * _DAY} T",
    "month": "1 month", "year": "12 month", "decade": "120 month", "century": "1200 month",
    "g": "1 M", "kg": "1000 M", "mg": "1/1000 M", "oz": "1 oz", "lb": "16 oz",
    "l": "1/1000 L3", "ml": "1/1000000 L3", "dl": "1/10000 L3", "cl": "1/100000 L3",
    "pt": "1 pt", "qt": "2 pt", "gal": "8 pt", "cent": "1 cent", "$": "100 cent",
}  # fmt: skip
"""Unit → its size in a basic unit, and the name of that one: a length, time, mass and so on."""

_FACTOR = re.compile(r"(?P<name>\S+?)(?:\^(?P<power>-?\d))?(?:\s|$)")
_GROUP = re.compile(r"\\(?:text(?:rm|bf|it|normal)?|math(?:rm|bf)|mbox)\s*\{([^{}]*)\}")
_PART = re.compile(
    r"\s*(?:(?P<money>＄)\s*)?(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>(?!and\b)[A-Za-z¢]+|'|″|\")?\.?\s*(?:,\s*)?(?:(?:and|&)\s+)?",
    re.ASCII,
)
_CLOCK = re.compile(
    r"(?P<hours>\d{1,2})(?::(?P<minutes>\d\d))?\s*(?:(?P<half>[ap])\.?\s?m\b\.?|(?P<sharp>o[’']clock))?(?:\s+sharp)?",
    re.IGNORECASE | re.ASCII,
)
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\.?"
)
_YEAR = r"(?:,?\s*(?P<year>\d{4}))?"
_DATES = tuple(
    re.compile(rf"(?:(?:the|on)\s+)*{form}{_YEAR}", re.IGNORECASE | re.ASCII)
    for form in (
        rf"{_MONTH}\s+(?:the\s+)?(?P<day>\d{{1,2}})(?:st|nd|rd|th)?",
        rf"(?P<day>\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH}",
    )
)
_RATIO = re.compile(r"\d{1,9}(?:\s*:\s*\d{1,9})+", re.ASCII)


def size(spelled: str) -> tuple[Fraction, str] | None:
    """The size of a unit, spelled as `units.unit` does, in basic units, and its dimension; None if it has none.

    >>> size("km h^-1") == (Fraction(1000, 3600), "L T^-1"), size("apple")
    (True, None)
    """
    factor, powers = Fraction(1), dict[str, int]()
    for match in _FACTOR.finditer(spelled):
        known, power = _FACTORS.get(match["name"]), int(match["power"] or 1)
        if known is None:
            return None
        value, dimension = known.split()
        base = dimension.removesuffix("3") if dimension == "L3" else dimension
        factor *= Fraction(value) ** power
        powers[base] = powers.get(base, 0) + power * (3 if dimension == "L3" else 1)
    names = sorted((name, power) for name, power in powers.items() if power)
    return (factor, " ".join(name if power == 1 else f"{name}^{power}" for name, power in names)) if names else None


def same_in_other_units(gold: Fraction, unit: str, answer: Fraction, other_unit: str) -> bool:
    """True if two quantities in different units of one dimension are equal: 5 km and 5000 m."""
    ours, theirs = size(unit), size(other_unit)
    return bool(ours and theirs and ours[1] == theirs[1] and gold * ours[0] == answer * theirs[0])


def same_sum(gold: str, answer: str) -> bool:
    """True if two quantities are equal, of which one has several units: `1 hour 30 minutes` and `90 minutes`."""
    ours, theirs = _sum(gold), _sum(answer)
    return bool(ours and theirs and ours[2] + theirs[2] > 2 and ours[:2] == theirs[:2])


def _sum(text: str) -> tuple[Fraction, str, int] | None:
    """Value in basic units, dimension and number of parts of `1 hour 30 minutes`, the larger unit first."""
    text = _GROUP.sub(r" \1 ", text)
    end, total, sizes = 0, Fraction(0), list[tuple[Fraction, str]]()
    while end < len(text) and (match := _PART.match(text, end)):
        name = "＄" if match["money"] else match["unit"]
        spelled = known_unit(name, True) if name else None
        one = size(spelled) if spelled else None
        if one is None or (sizes and (one[1] != sizes[-1][1] or one[0] >= sizes[-1][0])):
            return None
        total, end = total + Fraction(match["number"]) * one[0], match.end()
        sizes.append(one)
    return (total, sizes[0][1], len(sizes)) if sizes and end == len(text) else None


def same_clock(gold: str, answer: str) -> bool:
    """True if two times of day are the same: `2:30 p.m.` is `2:30` and `14:30`, which differ from each other."""
    ours, theirs = _clock(gold), _clock(answer)
    if ours is None or theirs is None or not (":" in gold or ours[1]) or not (":" in answer or theirs[1]):
        return False
    (minutes, half), (other, other_half) = ours, theirs
    if half == "o'clock" or other_half == "o'clock":
        return minutes == other and not (half in "ap" and other_half in "ap" and half != other_half)
    if half and other_half:
        return half == other_half and minutes == other
    if half or other_half:
        with_half, bare = (minutes, other) if half else (other, minutes)
        half = half or other_half
        on_24_hours = with_half % (12 * 60) + 12 * 60 * (half == "p")
        return bare in (with_half, on_24_hours)
    return minutes == other


def _clock(text: str) -> tuple[int, str] | None:
    """Minutes after midnight or noon as written, and "a", "p", "o'clock" or nothing."""
    match = _CLOCK.fullmatch(" ".join(_GROUP.sub(r" \1 ", text).replace("~", " ").split()))
    if match is None or int(match["minutes"] or 0) > 59 or int(match["hours"]) > (12 if match["half"] else 24):
        return None
    half = (match["half"] or ("o'clock" if match["sharp"] else "")).lower()
    return 60 * int(match["hours"]) + int(match["minutes"] or 0), half


def same_date(gold: str, answer: str) -> bool:
    """True if two texts are the same date: `October 30`, `Oct. 30th`, `30 October`; the year may be left out."""
    ours, theirs = _date(gold), _date(answer)
    return bool(ours and theirs and ours[:2] == theirs[:2] and len({ours[2], theirs[2]} - {""}) < 2)


def _date(text: str) -> tuple[str, int, str] | None:
    plain = " ".join(_GROUP.sub(r" \1 ", text).split()).strip(" .")
    match = next((match for form in _DATES if (match := form.fullmatch(plain))), None)
    return (match["month"][:3].lower(), int(match["day"]), match["year"] or "") if match else None


def same_ratio(gold: str, answer: str) -> bool:
    """True if two ratios, none of which can be a time of day, are proportional: `3:4`, `6:8` and `3/4`."""
    ours, theirs = _ratio(gold), _ratio(answer)
    if not (ours and theirs) or len(ours) != len(theirs):
        return False
    return all(a * theirs[0] == b * ours[0] for a, b in zip(ours, theirs, strict=True))


def _ratio(text: str) -> list[int] | None:
    text = re.sub(
        r"\\frac\{(\d{1,9})\}\{(\d{1,9})\}|(\d{1,9})/(\d{1,9})",
        r"\1\3:\2\4",
        re.sub(r"\s*(?:\\text\{\s*to\s*\}|\bto\b)\s*", ":", text.strip()),
    )
    if not _RATIO.fullmatch(text) or (_CLOCK.fullmatch(text) and ":" in text):
        return None
    parts = [int(part) for part in text.split(":")]
    return parts if all(parts) else None
