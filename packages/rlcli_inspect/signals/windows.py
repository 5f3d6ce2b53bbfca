"""The first and the last steps of a run, which signals compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlcli_inspect.signals.sample_record import Mean, Record, Step

MIN_STEPS = 3
"""Steps of each end."""
SHARE = 0.1
"""Share of the read steps that each end has."""
MIN_ROWS = 64
"""Rows of each end; a step of few rows makes the ends longer, up to a third of the steps each."""
RISE, ERRORS = 0.05, 3.0
"""The reward has risen if it is higher by this share of its range, and by this many standard errors."""


@dataclass(frozen=True)
class Ends:
    """The first and the last steps of a run."""

    first: Sequence[Step]
    """The first steps."""
    last: Sequence[Step]
    """The last steps."""
    rise: float
    """Rise of the mean reward between them."""
    risen: bool
    """True if the rise exceeds RISE and ERRORS."""


def ends_of(record: Record) -> Ends | None:
    """The ends of the steps read so far; None if they are too few to compare."""
    steps = record.steps
    size = max(MIN_STEPS, math.ceil(SHARE * len(steps)))
    while size <= len(steps) // 3 and min(_rows(steps[:size]), _rows(steps[-size:])) < MIN_ROWS:
        size += 1
    if 2 * size > len(steps) or min(_rows(steps[:size]), _rows(steps[-size:])) < MIN_ROWS:
        return None
    first, last = steps[:size], steps[-size:]
    rise = total([step.reward for step in last]).mean - total([step.reward for step in first]).mean
    error = math.sqrt(_variance(first) + _variance(last))
    return Ends(first, last, rise, rise >= RISE * record.span > 0.0 and rise >= ERRORS * error)


def total(means: Sequence[Mean]) -> Mean:
    """The mean of all values together."""
    return Mean(sum(mean.total for mean in means), sum(mean.count for mean in means))


def _rows(steps: Sequence[Step]) -> int:
    return sum(step.reward.count for step in steps)


def _variance(steps: Sequence[Step]) -> float:
    """Variance of the mean reward."""
    mean = total([step.reward for step in steps])
    return max(0.0, sum(step.squares for step in steps) / mean.count - mean.mean**2) / mean.count
