"""Whether a measured quantity grows with the steps of a run, told from noise and from steps that happen once."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = 12
"""Of each half: the medians of so many blocks of steps are looked at, so that single values do not matter."""
FEWEST = 5
"""Blocks of a half with a value in them; fewer say nothing."""
SIGNIFICANT = 2.0
"""Standard deviations of Kendall's S above 0: a probability of 0.023 without a trend, in each half."""

Point = tuple[float, float]
"""Step and value."""


@dataclass(frozen=True)
class Limit:
    """What is growth: more than `rate` per 1,000 steps, and more than `least` in all."""

    rate: float
    least: float


@dataclass(frozen=True)
class Trend:
    """first, last: values at the beginning and the end. rate: per 1,000 steps, of the half that grows less; a jump that
    happens once counts for nothing. enough: whether there were values enough to tell."""

    first: float
    last: float
    rate: float
    grows: bool
    enough: bool = True


def trend(points: Sequence[Point], after: float, limit: Limit) -> Trend:
    """How the values of `points` develop after the step `after`.

    They grow where both halves of the steps do. A half grows where the medians of its blocks rise (Kendall's test),
    by more than the limit's rate (Theil and Sen's slope), with the largest single jump taken out: a module that is
    imported late, or a cache that fills once, is no leak.

    >>> leak = [(float(step), 100.0 + step / 50 + step % 7) for step in range(1000)]
    >>> trend(leak, 200, Limit(rate=2.0, least=4.0)).grows
    True
    >>> jump = [(float(step), 100.0 + 50 * (step > 500) + step % 7) for step in range(1000)]
    >>> trend(jump, 200, Limit(rate=2.0, least=4.0)).grows
    False
    """
    kept = sorted(point for point in points if point[0] > after)
    if not kept:
        return Trend(math.nan, math.nan, math.nan, False, enough=False)
    middle = (kept[0][0] + kept[-1][0]) / 2
    halves = [_blocks([p for p in kept if p[0] <= middle]), _blocks([p for p in kept if p[0] > middle])]
    first, last = (halves[0] or halves[1])[0][1], (halves[1] or halves[0])[-1][1]
    if any(len(half) < FEWEST for half in halves):
        return Trend(first, last, math.nan, False, enough=False)
    smooth = [_without_largest_jump(half) for half in halves]
    rate = min(1000 * _slope(half) for half in smooth)
    rises = all(_kendall(half) > SIGNIFICANT for half in smooth)
    return Trend(first, last, rate, rises and rate > limit.rate and last - first > limit.least)


def _blocks(points: Sequence[Point]) -> list[Point]:
    """Median step and median value of each block of steps."""
    if not points:
        return []
    begin, end = points[0][0], points[-1][0]
    width = (end - begin) / BLOCKS or 1.0
    found: dict[int, list[Point]] = {}
    for point in points:
        found.setdefault(min(BLOCKS - 1, int((point[0] - begin) / width)), []).append(point)
    return [
        (statistics.median(step for step, _ in block), statistics.median(value for _, value in block))
        for _, block in sorted(found.items())
    ]


def _without_largest_jump(points: Sequence[Point]) -> list[Point]:
    jumps = [after[1] - before[1] for before, after in itertools.pairwise(points)]
    largest = max(range(len(jumps)), key=lambda index: jumps[index])
    taken = max(0.0, jumps[largest])
    return [(step, value - taken * (index > largest)) for index, (step, value) in enumerate(points)]


def _slope(points: Sequence[Point]) -> float:
    """The median of the slopes between all pairs (Theil and Sen)."""
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in _pairs(points) if b[0] > a[0])


def _kendall(points: Sequence[Point]) -> float:
    """Kendall's S in standard deviations, ties counted: how clearly the values rise."""
    n = len(points)
    s = sum((b[1] > a[1]) - (b[1] < a[1]) for a, b in _pairs(points))
    values = [value for _, value in points]
    ties = sum(t * (t - 1) * (2 * t + 5) for t in map(values.count, set(values)))
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    return (s - (s > 0) + (s < 0)) / math.sqrt(variance) if variance > 0 else 0.0


def _pairs(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    return [(a, b) for index, a in enumerate(points) for b in points[index + 1 :]]
