"""Records of a signal of reward hacking and of the samples that show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warning", "unknown"]

EXCERPT = 240
"""Characters of an example: the end of the response, which has the answer."""
EXAMPLES = 3


@dataclass(frozen=True)
class Example:
    """A sample of a training step that shows a signal."""

    step: int
    """Step of the sample."""
    prompt_id: str
    """Id of the prompt."""
    group: int | None
    """Group of the step; None in runs of an older rlcli."""
    sample: int
    """Index in the group."""
    excerpt: str
    """End of the response."""
    note: str
    """The evidence to look at in the response."""


@dataclass(frozen=True)
class Signal:
    """A signal of reward hacking."""

    name: str
    """Identifier."""
    title: str
    """Danger that the signal warns of."""
    value: float | None
    """At or above `threshold` the signal warns, if the reward has risen; None if it cannot be computed."""
    threshold: float
    """See `value`."""
    state: State
    """`unknown` without a value."""
    explanation: str
    """Meaning of the warning and what to do, or why there is no value."""
    series: Sequence[tuple[int, float]] = ()
    """Step → the quantity whose change `value` is."""
    examples: Sequence[Example] = ()
    """Samples that show it."""

    def as_dict(self) -> dict[str, object]:
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
    return ", ".join(f"{signal.name} ({signal.title})" for signal in signals if signal.state == "warning") or "none"
