"""A foreign configuration during translation, and the report of how each key was converted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")
Kind = Literal["mapped", "same", "unresolved", "missing"]


@dataclass(frozen=True)
class Unresolved:
    """A value that is not in the file, such as a shell variable or a Python name. text: as written there."""

    text: str


@dataclass(frozen=True)
class Line:
    """One line of the report."""

    kind: Kind
    """`mapped` to `key` = `value`; `same`: rlcli does the same without a key; `unresolved`: the value is not in the
    file; `missing`: rlcli has no counterpart."""
    source: str
    """The foreign key."""
    foreign_value: Any
    """Its value; None if the file does not set it (the foreign framework's default applies)."""
    key: str = ""
    """Our key, of a mapped line."""
    value: Any = None
    """Its value."""
    note: str = ""
    """Explanation; may be empty."""


@dataclass
class Reading:
    """A foreign configuration during translation."""

    foreign: Mapping[str, Any]
    """Values that the file sets, by foreign key."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The foreign framework's defaults."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Our keys and values so far."""
    lines: list[Line] = field(default_factory=list)
    """Lines of the report so far."""
    seen: set[str] = field(default_factory=set)
    """Foreign keys that have been handled."""
    looked_up: set[str] = field(default_factory=set)
    """Foreign keys whose value has been read."""
    counted: dict[str, str] = field(default_factory=dict)
    """Key that has no separate line → the key whose line it is part of; empty: none."""

    def __call__(self, source: str) -> Any:
        """The value of a foreign key: the file's, else the framework's default; None if there is neither."""
        self.looked_up.add(source)
        value = self.foreign.get(source)
        return self.defaults.get(source) if value is None or isinstance(value, Unresolved) else value

    def gives(self, source: str) -> bool:
        """True if the file itself sets the key to a known value."""
        self.looked_up.add(source)
        return source in self.foreign and not isinstance(self.foreign[source], Unresolved | None)

    def is_unresolved(self, source: str) -> bool:
        """True if the file sets the key to a value that is not in the file."""
        return isinstance(self.foreign.get(source), Unresolved)

    def number(self, source: str) -> float | None:
        """The value as a number; None if it is not one, which is then reported."""
        value = number_of(self(source))
        if value is None and self.gives(source):
            self.missing(source, "not a number")
        return value

    def whole(self, source: str) -> int:
        """The value as a whole number of at least 1; otherwise the default, else 1."""
        value = self.number(source)
        if value is None or value < 1:
            value = number_of(self.defaults.get(source)) or 1
        return max(int(value), 1)

    def flag(self, source: str) -> bool:
        """True if the value is true."""
        value = self(source)
        return value.strip().lower() == "true" if isinstance(value, str) else bool(value)

    def text(self, source: str) -> str:
        value = self(source)
        return "" if value is None else str(value)

    def map(self, source: str, key: str, value: Any, note: str = "", also: Iterable[str] = ()) -> None:
        """Set `key`. also: further foreign keys used for it."""
        self.settings[key] = value
        if self.is_unresolved(source):
            note = f"{note}; the file's value is not known".removeprefix("; ")
        self.lines.append(Line("mapped", source, self._given(source), key, value, note))
        self.seen |= {source, *also}
        self.counted |= dict.fromkeys(also, source)

    def same(self, source: str, note: str) -> None:
        if source in self.foreign:
            self._once(Line("same", source, self._given(source), note=note))

    def missing(self, source: str, note: str) -> None:
        """Report a key without a counterpart, or without one for this value."""
        self._once(Line("missing", source, self._given(source), note=note))

    def trackers(self, source: str, nothing: str, note: str) -> None:
        """Map the names of trackers. nothing: the name that stands for none; note: what rlcli has without any."""
        value = self(source)
        names = [str(name) for name in value] if isinstance(value, list) else [str(value)] if value else []
        known = [name for name in names if name in TRACKERS]
        if known:
            self.map(source, "tracking.trackers", known)
        elif names == [nothing]:
            self.same(source, note)
        if others := [name for name in names if name not in (*known, nothing)]:
            self.seen.discard(source)
            self.missing(source, f"no tracker called {', '.join(others)}")

    def skip(self, *sources: str) -> None:
        """Mark keys as handled. Those that the file gives and that have no line are reported as without effect."""
        self.seen |= {*sources}
        for source in sources:
            self.counted.setdefault(source, "")

    def direct(self, table: Mapping[str, tuple[str, type]]) -> None:
        """Map each foreign key of `table` that the file or the framework sets to our key, with the given type."""
        for source, (key, kind) in table.items():
            if kind is bool:
                self.map(source, key, self.flag(source))
            elif kind is str:
                if self.text(source):
                    self.map(source, key, self.text(source))
            elif (value := self.number(source)) is not None:
                self.map(source, key, int(value) if kind is int else float(value))

    def finish(self, same: Mapping[str, str], missing: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
        """Report the keys that were not read, by notes → patterns; drop settings that the file does not give and that
        equal our defaults."""
        for source, value in self.foreign.items():
            if isinstance(value, Unresolved) and (source in self.looked_up or source == "**"):
                self.lines.append(Line("unresolved", source, value.text))
            elif source.endswith("._target_"):
                continue
            elif source not in self.seen and value is None:
                self.same(source, "not set")
            elif source not in self.seen:
                self._rest(source, value, same, missing)
        needless = {
            line.key
            for line in self.lines
            if line.kind == "mapped" and line.foreign_value is None and defaults.get(line.key) == line.value
        }
        self.settings = {key: value for key, value in self.settings.items() if key not in needless}
        self.lines = [line for line in self.lines if line.key not in needless]
        reported = {line.source for line in self.lines}
        for source in self.foreign:
            if source not in reported and not source.endswith("._target_"):
                counted_in = self.counted.get(source)
                note = (
                    f"counted in the line of {counted_in}"
                    if counted_in in reported
                    else "without effect beside the other values"
                )
                self.lines.append(Line("same", source, self._given(source), note=note))

    def _rest(self, source: str, value: Any, same: Mapping[str, str], missing: Mapping[str, str]) -> None:
        def note(table: Mapping[str, str]) -> str:
            notes = (
                note
                for note, patterns in table.items()
                if any(fnmatchcase(source, pattern) for pattern in patterns.split())
            )
            return next(notes, "")

        if known := note(same):
            self.same(source, known)
        elif value is False or value in ([], {}, ""):
            self.same(source, "off")
        else:
            self.missing(source, note(missing))

    def _given(self, source: str) -> Any:
        """The value in the file, for the report: None if it is not known."""
        value = self.foreign.get(source)
        return None if isinstance(value, Unresolved) else value

    def _once(self, line: Line) -> None:
        if line.source not in self.seen:
            self.lines.append(line)
        self.seen.add(line.source)


def number_of(value: Any) -> float | None:
    """A number, also from text; None for anything else. Python would read verl's bounds `0.5_2` as 0.52.

    >>> number_of("1e-6"), number_of(True), number_of("ten"), number_of("0.5_2")
    (1e-06, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str) or "_" in str(value):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(number) or abs(number) > 1e18:
        return None
    return int(number) if isinstance(value, int) or number == int(number) else number


def scalar(text: str) -> Any:
    """A value as hydra reads it from a command line: true, null, a number, a list, or text without its quotes. The word
    none is a text, which has a meaning in keys such as TRL's scale_rewards.

    >>> [scalar(text) for text in ("True", "null", "none", "5", "1e-6", "['a','b']", "'a b'", "~/data")]
    [True, None, 'none', 5, 1e-06, ['a', 'b'], 'a b', '~/data']
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        return [scalar(item) for item in text[1:-1].split(",") if item.strip()]
    quoted = re.fullmatch(r"(['\"])(.*)\1", text, re.DOTALL)
    if quoted:
        return quoted[2]
    words = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    number = number_of(text)
    return text if number is None else number


def divisor_near(number: int, parts: float) -> int:
    """The divisor of `number` nearest to `parts`; of two, the smaller one.

    >>> divisor_near(32, 3), divisor_near(32, 100)
    (2, 32)
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return min({*small, *(number // n for n in small)}, key=lambda n: (abs(n - parts), n))
