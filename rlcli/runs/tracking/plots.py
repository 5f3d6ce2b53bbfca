"""Draws the curve of a run's measure (its reward or its loss), as a PNG and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import SetupError
from rlcli.runs.curve_marks import Mark
from rlcli.runs.run_measure import REWARD, Measure
from rlcli.support.files import replacing
from rlcli.support.redact import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, FAINT, RED, GREY = "#2563a8", "#a9c3e0", "#c2410c", "#4b5563"
BRAILLE = 0x2800
DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the dot at [row][column] of a braille character, 4 rows by 2 columns."""


def reward_curve_png(
    path: Path,
    steps: Sequence[int],
    rewards: Sequence[float],
    evaluations: Mapping[int, tuple[float, float, float]],
    measure: Measure = REWARD,
    marks: Sequence[Mark] = (),
) -> None:
    """Write a PNG, atomically: the mean reward of each step, its running mean, and pass@1 on held-out prompts. With a
    loss, pass@1 has a second axis.

    evaluations: step → (pass@1, low, high). rewards: of `measure`. marks: dashed lines. Raises `SetupError` if
    matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError:
        raise SetupError("the reward curve needs matplotlib", "pip install 'rlcli[cpu]' or 'rlcli[gpu]'") from None

    # A Figure without pyplot: no global state and no display.
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    _draw_rewards(axes, steps, rewards, measure.name)
    for mark in marks:
        label = printable(mark.text).replace("$", r"\$")  # between two of them matplotlib reads mathematics
        axes.axvline(mark.step + 0.5, color=GREY, linestyle="--", linewidth=1.2, label=label)
    pass_axes = axes.twinx() if evaluations and measure != REWARD else None
    if evaluations:
        _draw_evaluations(axes if pass_axes is None else pass_axes, evaluations)
    axes.set_xlabel("step")
    axes.set_ylabel(measure.in_words + (", pass@1" if evaluations and pass_axes is None else ""))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.03)
    if pass_axes is not None:
        pass_axes.set_ylim(0.0, 1.02)
        pass_axes.set_ylabel("pass@1")
        pass_axes.spines["top"].set_visible(False)
    elif all(0.0 <= value <= 1.0 for value in rewards if isfinite(value)):  # a rate is best shown on its full scale
        axes.set_ylim(0.0, 1.02)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [
        handle for each in (axes, pass_axes) if each is not None for handle in each.get_legend_handles_labels()[0]
    ]
    (axes if pass_axes is None else pass_axes).legend(handles=handles, frameon=False, loc="best")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw_rewards(axes: Axes, steps: Sequence[int], rewards: Sequence[float], name: str) -> None:
    window = len(rewards) // 15
    if window > 1:
        axes.plot(steps, rewards, color=FAINT, linewidth=1.2, label=f"{name} of a step")
        axes.plot(steps, running_mean(rewards, window), color=BLUE, linewidth=2.2, label=f"mean of {window} steps")
    else:
        axes.plot(steps, rewards, color=BLUE, linewidth=2.2, marker="o", markersize=4, label=f"{name} of a step")


def _draw_evaluations(axes: Axes, evaluations: Mapping[int, tuple[float, float, float]]) -> None:
    steps = sorted(evaluations)
    means = [evaluations[step][0] for step in steps]
    below = [evaluations[step][0] - evaluations[step][1] for step in steps]
    above = [evaluations[step][2] - evaluations[step][0] for step in steps]
    label = "held-out pass@1 with 95% interval"
    axes.errorbar(steps, means, [below, above], color=RED, fmt="o", capsize=4, clip_on=False, zorder=3, label=label)
    # The key numbers, the first above its interval and the last beside its mark, so that they do not hide the curve.
    first, last = steps[0], steps[-1]
    axes.annotate(
        f"{means[-1]:.0%}", (last, means[-1]), xytext=(9, 0), textcoords="offset points", va="center", color=RED
    )
    if first != last:
        top = (first, evaluations[first][2])
        axes.annotate(f"{means[0]:.0%}", top, xytext=(0, 4), textcoords="offset points", ha="center", color=RED)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to `window - 1` values before it; non-finite values are left out.

    >>> running_mean([0.0, 1.0, 2.0], window=2)
    [0.0, 0.5, 1.5]
    """
    means = []
    for end in range(1, len(values) + 1):
        span = [value for value in values[max(0, end - window) : end] if isfinite(value)]
        means.append(sum(span) / len(span) if span else float("nan"))
    return means


def reward_curve_text(
    rewards: Sequence[float], width: int, height: int, first: int = 1, marks: Sequence[Mark] = ()
) -> str:
    """The same curve for a terminal: `height` lines of braille dots, 2 or more, and the axis, `width` characters wide.

    first: the step of the first reward. marks: a triangle on the axis, and a line of text each. Non-finite
    values break the line. Without rewards the text is empty.
    """
    assert height >= 2, height
    finite = [value for value in rewards if isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    labels = [f"{high - (high - low) * row / (height - 1):.2f}" for row in range(height)]
    margin = max(map(len, labels))
    columns = max(2, width - margin - 2)
    dots = _dots(rewards, low, high, columns, height)
    lines = []
    for row in range(height):
        # Every other line has a label; the first and the last always.
        label = labels[row] if row % 2 == 0 or row == height - 1 else ""
        cells = "".join(chr(BRAILLE + bits) for bits in dots[row]).replace(chr(BRAILLE), " ")
        lines.append(f"{label:>{margin}} {'┤' if label else '│'}{cells}".rstrip())
    begin, end = str(first), f"step {first + len(rewards) - 1}"
    shown = [mark for mark in marks if first <= mark.step < first + len(rewards) - 1]
    axis = ["─"] * columns
    for mark in shown:
        axis[round((mark.step + 0.5 - first) / (len(rewards) - 1) * (columns - 1))] = "▲"
    lines.append(" " * margin + " └" + "".join(axis))
    lines.append(" " * (margin + 2) + begin + end.rjust(columns - len(begin)))
    lines += [f"▲ {mark.text}" for mark in shown]
    return "\n".join(lines)


def _dots(rewards: Sequence[float], low: float, high: float, columns: int, height: int) -> list[list[int]]:
    """Braille bits of the polyline through the rewards: [height][columns]."""
    across, down = 2 * columns - 1, 4 * height - 1
    bits = [[0] * columns for _ in range(height)]

    def coordinates(index: int) -> tuple[float, float]:
        return index * across / max(1, len(rewards) - 1), (high - rewards[index]) / (high - low) * down

    def mark(x: float, y: float) -> None:
        column, row = round(x), round(y)
        bits[row // 4][column // 2] |= DOT_BITS[row % 4][column % 2]

    for index, value in enumerate(rewards):
        if isfinite(value):
            mark(*coordinates(index))
    for index, (start, end) in enumerate(pairwise(rewards)):
        if isfinite(start) and isfinite(end):
            (x0, y0), (x1, y1) = coordinates(index), coordinates(index + 1)
            points = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
            for point in range(points):
                mark(x0 + (x1 - x0) * point / points, y0 + (y1 - y0) * point / points)
    return bits
