"""Tests if a measured quantity grows with the steps of a run, as opposed to noise and one-time jumps."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = 12
"""Blocks of steps in each half, whose medians are compared, so that single values do not matter."""
FEWEST = 5
"""Blocks of a half with a value in them; fewer say nothing."""
SIGNIFICANT = 2.0
"""Standard deviations of Kendall's S above 0: a probability of 0.023 without a trend, in each half."""

Point = tuple[float, float]
"""Step and value."""


@dataclass(frozen=True)
class Limit:
    """Limits of growth: more than `rate` per 1,000 steps, and more than `least` in all."""

    rate: float
    least: float


@dataclass(frozen=True)
class Trend:
    """Trend of the values of one quantity."""

    first: float
    """Value at the beginning."""
    last: float
    """Value at the end."""
    rate: float
    """Growth per 1,000 steps in the half that grows less, without its largest jump."""
    grows: bool
    """The verdict."""
    enough: bool = True
    """There were enough values for a verdict."""


def trend(points: Sequence[Point], warm_up: float, limit: Limit) -> Trend:
    """The trend of the values of `points` after the step `warm_up`.

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
    retained = sorted(point for point in points if point[0] > warm_up)
    if not retained:
        return Trend(math.nan, math.nan, math.nan, False, enough=False)
    middle = (retained[0][0] + retained[-1][0]) / 2
    halves = [_blocks([p for p in retained if p[0] <= middle]), _blocks([p for p in retained if p[0] > middle])]
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
    blocks: dict[int, list[Point]] = {}
    for point in points:
        blocks.setdefault(min(BLOCKS - 1, int((point[0] - begin) / width)), []).append(point)
    return [
        (statistics.median(step for step, _ in block), statistics.median(value for _, value in block))
        for _, block in sorted(blocks.items())
    ]


def _without_largest_jump(points: Sequence[Point]) -> list[Point]:
    jumps = [following[1] - previous[1] for previous, following in itertools.pairwise(points)]
    largest = max(range(len(jumps)), key=lambda index: jumps[index])
    jump = max(0.0, jumps[largest])
    return [(step, value - jump * (index > largest)) for index, (step, value) in enumerate(points)]


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
