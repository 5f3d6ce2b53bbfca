"""One signal of reward hacking: its value, its threshold, what it means, and samples that show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warning", "unknown"]

EXCERPT = 240
"""Characters of an example: its end, where answers stand."""
EXAMPLES = 3


@dataclass(frozen=True)
class Example:
    """One sample of a training step. group: of the step; None in runs of an older rlcli. note: what to look at."""

    step: int
    prompt_id: str
    group: int | None
    sample: int
    excerpt: str
    note: str


@dataclass(frozen=True)
class Signal:
    """value: compared with `threshold`: at or above it the signal warns, while the reward has risen. None if it cannot
    be computed; the explanation then names why. series: step → the quantity whose change `value` is."""

    name: str
    title: str
    value: float | None
    threshold: float
    state: State
    explanation: str
    series: Sequence[tuple[int, float]] = ()
    examples: Sequence[Example] = ()

    def as_dict(self) -> dict[str, Any]:
        """For `--json` and for the page."""
        series = [[step, value] for step, value in self.series]
        return asdict(self) | {"series": series, "examples": [asdict(example) for example in self.examples]}


def example_of(step: int, row: Mapping[str, Any], note: str) -> Example:
    """A row of samples as an example."""
    text = str(row.get("response") or "")
    excerpt = text if len(text) <= EXCERPT else f"…{text[-EXCERPT:]}"
    return Example(step, str(row.get("prompt_id")), row.get("group"), int(row.get("sample") or 0), excerpt, note)


def summary(signals: Sequence[Signal]) -> str:
    """One line: the signals that warn.

    >>> summary([Signal("length", "Length is rewarded", 0.5, 0.25, "warning", "")])
    'length (Length is rewarded)'
    >>> summary([])
    'none'
    """
    return ", ".join(f"{one.name} ({one.title})" for one in signals if one.state == "warning") or "none"
