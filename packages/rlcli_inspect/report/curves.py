"""The curves of several runs over steps, over the tokens they generated and over their seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from rlcli.runs.listing import number

X = Literal["step", "tokens", "seconds"]
XS: tuple[X, ...] = ("step", "tokens", "seconds")
MOST_POINTS = 400
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
    """One run's curve: x ascending."""

    run: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Curve:
    """The curves of one metric over one x, for the runs that have it."""

    title: str
    x: X
    series: Sequence[Series]

    def as_dict(self) -> dict[str, Any]:
        series = [{"run": one.run, "points": [list(point) for point in one.points]} for one in self.series]
        return {"title": self.title, "x": self.x, "series": series}


def curves_of(runs: Sequence[tuple[str, Sequence[Line]]]) -> list[Curve]:
    """All curves of the runs, given as name and lines of metrics.jsonl."""
    places = [{x: _PLACES[x](lines) for x in XS} for _, lines in runs]
    found = []
    for metric, title in TITLES.items():
        for x in XS:
            series = [
                Series(name, thinned(points))
                for (name, lines), own in zip(runs, places, strict=True)
                if (points := points_of(lines, metric, own[x]))
            ]
            if series:
                found.append(Curve(title, x, series))
    return found


def points_of(lines: Sequence[Line], metric: str, places: Sequence[float]) -> list[Point]:
    """The values of a metric, as far as they are finite, with the place of their line on the x axis.

    >>> points_of([{"step": 1}, {"step": 2, "eval/pass@1": 0.5}], "eval/pass@1", [2.0, 5.0])
    [(5.0, 0.5)]
    """
    values = (number(line.get(metric)) for line in lines)
    return [(place, value) for place, value in zip(places, values, strict=True) if value is not None]


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points: the mean value of each bin of consecutive ones, at the place of its last.

    >>> thinned([(1.0, 0.0), (2.0, 1.0), (3.0, 2.0), (4.0, 4.0)], most=2)
    [(2.0, 0.5), (4.0, 3.0)]
    """
    if len(points) <= most:
        return list(points)
    edges = [round(bin * len(points) / most) for bin in range(most + 1)]
    bins = [points[start:end] for start, end in pairwise(edges)]
    return [(bin[-1][0], sum(value for _, value in bin) / len(bin)) for bin in bins]


def at(points: Sequence[Point], place: float) -> float | None:
    """The value of a curve at `place`: the mean of the points in the last twentieth of the way there, at least the last
    one; None before its first point.

    >>> at([(1.0, 0.0), (2.0, 0.5), (3.0, 1.0)], 2.5)
    0.5
    """
    before = [point for point in points if point[0] <= place]
    if not before:
        return None
    last = before[-1][0]
    near = [value for at, value in before if at > last - place / 20] or [before[-1][1]]
    return sum(near) / len(near)


def _steps(lines: Sequence[Line]) -> list[float]:
    return [number(line.get("step")) or 0.0 for line in lines]


def _tokens(lines: Sequence[Line]) -> list[float]:
    """Tokens generated up to the end of each step, as samples × their mean length."""
    return _sums(lines, lambda line: _of(line, "rollout/generated") * _of(line, "response_tokens/mean"))


def _seconds(lines: Sequence[Line]) -> list[float]:
    """Seconds up to the end of each step, with checkpoints and evaluations."""
    names = ("time/step_s", "time/checkpoint_s", "time/evaluate_s")
    return _sums(lines, lambda line: sum(_of(line, name) for name in names))


def _sums(lines: Sequence[Line], value: Callable[[Line], float]) -> list[float]:
    total, found = 0.0, []
    for line in lines:
        total += value(line)
        found.append(total)
    return found


def _of(line: Line, name: str) -> float:
    return number(line.get(name)) or 0.0


_PLACES: dict[X, Callable[[Sequence[Line]], list[float]]] = {"step": _steps, "tokens": _tokens, "seconds": _seconds}
