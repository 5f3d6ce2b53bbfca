"""Curves of several runs over steps, generated tokens and seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from rlcli.runs.listing import number

X = Literal["step", "tokens", "seconds"]
XS: tuple[X, ...] = ("step", "tokens", "seconds")
MAX_POINTS = 400
"""Points of one curve; more are averaged in equal bins."""
TITLES = {
    "reward/mean": "Reward",
    "eval/pass@1": "Evaluation: pass@1",
    "eval/mean@1": "Evaluation: mean@1",
    "outcome/ok": "Share of right samples",
    "response_tokens/mean": "Response length in tokens",
    "update/entropy": "Entropy in nats",
    "update/kl": "KL to the reference",
    "update/grad_norm": "Gradient norm",
}
"""Metric → title of its curve, in the order of the page."""

Line = Mapping[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One run's curve."""

    run: str
    points: Sequence[Point]
    """x and value, ascending in x."""


@dataclass(frozen=True)
class Curve:
    """The curves of one metric over one x, for the runs that have it."""

    title: str
    """Title, by metric."""
    x: X
    """Quantity of the x axis."""
    series: Sequence[Series]
    """One for each run with the metric."""

    def as_dict(self) -> dict[str, object]:
        series = [{"run": curve.run, "points": [list(point) for point in curve.points]} for curve in self.series]
        return {"title": self.title, "x": self.x, "series": series}


def curves_of(runs: Sequence[tuple[str, Sequence[Line]]]) -> list[Curve]:
    """All curves of the runs, given as name and lines of metrics.jsonl."""
    axes = [{x: _AXES[x](lines) for x in XS} for _, lines in runs]
    curves = []
    for metric, title in TITLES.items():
        for x in XS:
            series = [
                Series(name, thinned(points))
                for (name, lines), run_axes in zip(runs, axes, strict=True)
                if (points := points_of(lines, metric, run_axes[x]))
            ]
            if series:
                curves.append(Curve(title, x, series))
    return curves


def points_of(lines: Sequence[Line], metric: str, xs: Sequence[float]) -> list[Point]:
    """The values of a metric, as far as they are finite, with the x of their line.

    >>> points_of([{"step": 1}, {"step": 2, "eval/pass@1": 0.5}], "eval/pass@1", [2.0, 5.0])
    [(5.0, 0.5)]
    """
    values = (number(line.get(metric)) for line in lines)
    return [(x, value) for x, value in zip(xs, values, strict=True) if value is not None]


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: the mean value of each bin of consecutive ones, at the x of its last.

    >>> thinned([(1.0, 0.0), (2.0, 1.0), (3.0, 2.0), (4.0, 4.0)], limit=2)
    [(2.0, 0.5), (4.0, 3.0)]
    """
    if len(points) <= limit:
        return list(points)
    edges = [round(bin * len(points) / limit) for bin in range(limit + 1)]
    bins = [points[start:end] for start, end in pairwise(edges)]
    return [(bin[-1][0], sum(value for _, value in bin) / len(bin)) for bin in bins]


def at(points: Sequence[Point], x: float) -> float | None:
    """The value of a curve at `x`: the mean of the points in the last twentieth of the range up to x, at least the last
    one; None before its first point.

    >>> at([(1.0, 0.0), (2.0, 0.5), (3.0, 1.0)], 2.5)
    0.5
    """
    reached = [point for point in points if point[0] <= x]
    if not reached:
        return None
    last = reached[-1][0]
    near = [value for at, value in reached if at > last - x / 20] or [reached[-1][1]]
    return sum(near) / len(near)


def _steps(lines: Sequence[Line]) -> list[float]:
    return [number(line.get("step")) or 0.0 for line in lines]


def _tokens(lines: Sequence[Line]) -> list[float]:
    """Tokens generated up to the end of each step, as samples × their mean length."""
    return _sums(lines, lambda line: _value(line, "rollout/generated") * _value(line, "response_tokens/mean"))


def _seconds(lines: Sequence[Line]) -> list[float]:
    """Seconds up to the end of each step, with checkpoints and evaluations."""
    names = ("time/step_s", "time/checkpoint_s", "time/evaluate_s")
    return _sums(lines, lambda line: sum(_value(line, name) for name in names))


def _sums(lines: Sequence[Line], value: Callable[[Line], float]) -> list[float]:
    total, sums = 0.0, []
    for line in lines:
        total += value(line)
        sums.append(total)
    return sums


def _value(line: Line, name: str) -> float:
    return number(line.get(name)) or 0.0


_AXES: dict[X, Callable[[Sequence[Line]], list[float]]] = {"step": _steps, "tokens": _tokens, "seconds": _seconds}
