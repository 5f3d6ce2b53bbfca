"""Units of measurement in one spelling: `km/h`, `kilometers per hour` and `kph` are equal, `mph` is different."""

from __future__ import annotations

import re
from functools import lru_cache

_LONG = {
    "m": "meter metre", "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre",
    "dm": "decimeter decimetre", "nm": "nanometer nanometre", "um": "micrometer micrometre micron",
    "in": "inch", "ft": "foot feet", "yd": "yard", "mi": "mile", "ly": "lightyear", "acre": "acre",
    "ha": "hectare", "g": "gram gramme", "kg": "kilogram", "mg": "milligram", "t": "ton tonne", "lb": "pound",
    "oz": "ounce", "s": "second", "ms": "millisecond", "us": "microsecond", "ns": "nanosecond", "min": "minute",
    "h": "hour", "day": "day", "week": "week", "month": "month", "year": "year", "decade": "decade",
    "century": "century centurie", "l": "liter litre", "ml": "milliliter millilitre", "dl": "deciliter decilitre",
    "cl": "centiliter centilitre", "gal": "gallon", "qt": "quart", "pt": "pint", "$": "dollar buck", "cent": "cent",
    "eur": "euro", "yen": "yen", "cny": "yuan", "inr": "rupee", "deg": "degree", "rad": "radian", "J": "joule",
    "kJ": "kilojoule", "MJ": "megajoule", "cal": "calorie", "kcal": "kilocalorie", "W": "watt", "kW": "kilowatt",
    "MW": "megawatt", "N": "newton", "kN": "kilonewton", "Pa": "pascal", "kPa": "kilopascal", "V": "volt",
    "kV": "kilovolt", "A": "ampere amp", "mA": "milliampere milliamp", "ohm": "ohm", "Hz": "hertz",
    "kHz": "kilohertz", "MHz": "megahertz", "GHz": "gigahertz", "K": "kelvin", "degC": "celsius",
    "degF": "fahrenheit", "mol": "mole", "bit": "bit", "B": "byte", "kB": "kilobyte", "MB": "megabyte",
    "GB": "gigabyte", "TB": "terabyte", "eV": "electronvolt", "atm": "atmosphere", "": "unit",
}  # fmt: skip
_SHORT = {
    "s": "sec secs", "min": "mins", "h": "hr hrs", "year": "yr yrs", "lb": "lbs", "$": "＄ usd USD", "cent": "¢",
    "eur": "€ EUR", "gbp": "£ GBP", "yen": "¥ JPY", "cny": "RMB CNY", "inr": "₹ INR",
    "l": "L ltr", "ml": "mL", "cm cm cm": "cc",
    "mi /h": "mph MPH", "km /h": "kph kmh kmph KMH", "ft /s": "fps", "kB": "KB", "kJ": "KJ", "kW h": "kWh KWH",
    "W h": "Wh", "degC": "C", "degF": "F", "kg": "Kg KG", "km": "Km KM", "cm": "CM", "rpm": "rpm", "psi": "psi",
    "um": "µm μm", "us": "µs μs", "mJ": "mJ", "mW": "mW", "GW": "GW", "mV": "mV", "MPa": "MPa", "keV": "keV",
    "MeV": "MeV", "GeV": "GeV", "mmol": "mmol", "t": "tons", "ohm": "Ω", "ft ft": "sqft", "dB": "dB", "deg": "deg",
    "m": "m", "cm cm": "sqcm", "g": "gm gms",
}  # fmt: skip
_NAMES = {name: short for short, names in _LONG.items() for name in names.split()}
_ABBREVIATIONS = {short: short for short in _LONG if short not in ("", "$")}
_ABBREVIATIONS |= {name: short for short, names in _SHORT.items() for name in names.split()}
_ALGEBRA = frozenset(
    re.findall(r"\w+", "um us ns ms ly ha dl cl pt qt Pa mA kN kV mJ mW mV MW GW MJ kB MB GB TB inr cny eur")
)
"""Abbreviations that without `\\text{}` may be a product of unknowns, as single letters may."""
_HALF_DAY = re.compile(r"([ap])\.?\s?m", re.IGNORECASE)
_FACTOR = re.compile(
    r"\s*(?:(?P<over>/|(?:per|an?|each|every)(?=\s))|(?P<skip>\\cdot(?![A-Za-z])|[*.-])"
    r"|(?P<ahead>square|sq|cubic|cu)\b|(?P<squared>squared|cubed)\b|\^\s*\{?\s*(?P<power>-?[1-9])\s*\}?"
    r"|(?P<name>[A-Za-zµμΩ]+|[＄€£¥₹¢]))"
)


@lru_cache(maxsize=4096)
def unit(text: str, is_text: bool) -> str | None:
    r"""A product of known units in one spelling; empty for unspecified "units", None for text that is not a unit.

    is_text: it is in `\text{}`, where one letter may be a unit.

    >>> unit("km/h", True), unit("miles per hour", False), unit("mph", True), unit("square feet", True)
    ('km h^-1', 'mi h^-1', 'mi h^-1', 'ft^2')
    >>> unit("square units", True), unit("million", True)
    ('', None)
    """
    factors: list[tuple[str, int]] = []
    sign, prefix_power, at, text = 1, 1, 0, text.strip().rstrip(".")
    if (half := _HALF_DAY.fullmatch(text)) and (is_text or "." in text):
        return f"{half[1].lower()}m"
    while at < len(text):
        match = _FACTOR.match(text, at)
        if match is None:
            return None
        at = match.end()
        if match["over"]:
            sign = -1
        elif match["ahead"]:
            prefix_power = 2 if match["ahead"].startswith("s") else 3
        elif match["squared"] or match["power"]:
            if not factors:
                return None
            name, power = factors.pop()
            factors.append((name, power * (int(match["power"] or 0) or {"s": 2, "c": 3}[match["squared"][0]])))
        elif match["name"]:
            known = _known(match["name"], is_text or "/" in text)
            if known is None:
                return None
            for factor in known.split(" "):
                over = -1 if factor.startswith("/") else 1
                factors.append((factor.removeprefix("/"), sign * over * prefix_power))
            sign, prefix_power = 1, 1
    return _spelled(factors) if factors and sign == prefix_power == 1 else None


def agree(gold: str, answer: str) -> bool:
    """True if two units may be equal: identical, one not given, or degrees of which one has no scale.

    `#triangle` is a noun, and `#` one that names nothing in particular.
    """
    if gold == answer or not (gold and answer) or {gold, answer} in ({"deg", "degC"}, {"deg", "degF"}):
        return True
    return gold[0] == answer[0] == "#" and "#" in (gold, answer)


def _spelled(factors: list[tuple[str, int]]) -> str:
    """Each unit once with its power, in alphabetical order within a sign."""
    powers: dict[str, int] = {}
    for name, power in factors:
        powers[name] = powers.get(name, 0) + power
    if "deg" in powers and ({"degC", "degF"} & powers.keys()):  # degrees Celsius
        del powers["deg"]
    ordered = sorted((power < 0, name, power) for name, power in powers.items() if name and power)
    return " ".join(name if power == 1 else f"{name}^{power}" for _, name, power in ordered)


def _known(name: str, is_text: bool) -> str | None:
    """The short name of one unit; None for an unknown one."""
    if name in _ABBREVIATIONS and (is_text or (len(name) > 1 and name not in _ALGEBRA) or not name.isascii()):
        return _ABBREVIATIONS[name]
    lower = name.lower()
    candidates = (lower, lower.removesuffix("s"), lower.removesuffix("es"))
    return next((_NAMES[spelling] for spelling in candidates if spelling in _NAMES and len(spelling) > 2), None)
