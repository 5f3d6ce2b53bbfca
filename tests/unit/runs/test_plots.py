from __future__ import annotations

import builtins
import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from rlcli.errors import SetupError
from rlcli.runs.curve_marks import Mark
from rlcli.runs.run_measure import LOSS
from rlcli.runs.tracking.plots import reward_curve_png, reward_curve_text, running_mean

RISING = [step / 59 for step in range(60)]


def ink(text: str, column: int) -> list[int]:
    """Lines of the curve that have a dot in the column, the top one 0."""
    rows = [line for line in text.splitlines() if "┤" in line or "│" in line]
    cells = [line.split("┤" if "┤" in line else "│", 1)[1].ljust(column + 1) for line in rows]
    return [row for row, line in enumerate(cells) if line[column] != " "]


def test_a_rising_reward_rises_across_the_terminal() -> None:
    text = reward_curve_text(RISING, width=64, height=10)
    lines = text.splitlines()
    assert len(lines) == 12
    assert max(map(len, lines)) == 64
    assert lines[0].startswith("1.00 ┤")
    assert lines[9].startswith("0.00 ┤")
    assert lines[-1].split() == ["1", "step", "60"]
    assert ink(text, 0) == [9]
    assert ink(text, 57) == [0]
    middles = [sum(inked) / len(inked) for column in range(58) if (inked := ink(text, column))]
    assert len(middles) == 58  # no gaps
    assert middles == sorted(middles, reverse=True)


def test_a_value_that_is_no_number_breaks_the_line() -> None:
    text = reward_curve_text([0.0, 1.0, math.nan, math.nan, 0.5, 0.5], width=40, height=4)
    gap = [column for column in range(34) if not ink(text, column)]
    assert gap
    assert min(gap) > 5
    assert max(gap) < 28


def test_a_flat_reward_lies_between_its_axis_numbers() -> None:
    text = reward_curve_text([0.0] * 5, width=30, height=3)
    assert {row for column in range(20) for row in ink(text, column)} == {1}
    assert text.startswith(" 0.50 ┤")


def test_no_rewards_give_no_curve() -> None:
    assert reward_curve_text([], 40, 5) == ""
    assert reward_curve_text([math.nan], 40, 5) == ""


@given(
    st.lists(st.floats(-100, 100) | st.sampled_from([math.nan, math.inf]), max_size=200),
    st.integers(20, 100),
    st.integers(2, 20),
)
def test_any_rewards_fit_the_size_asked_for(rewards: list[float], width: int, height: int) -> None:
    lines = reward_curve_text(rewards, width, height).splitlines()
    assert len(lines) in (0, height + 2)
    assert all(len(line) <= width for line in lines)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=50), st.integers(1, 10))
def test_a_running_mean_is_the_mean_of_what_came_before(values: list[float], window: int) -> None:
    means = running_mean(values, window)
    for end, mean in enumerate(means, start=1):
        span = values[max(0, end - window) : end]
        assert mean == pytest.approx(math.fsum(span) / len(span), abs=1e-9)


@pytest.mark.parametrize(
    ("rewards", "evaluations"),
    [
        (RISING, {0: (0.1, 0.05, 0.15), 60: (0.9, 0.85, 0.95)}),
        ([0.5], {}),
        ([-1.0, math.nan, 2.0], {0: (0.0, 0.0, 0.05)}),
    ],
    ids=["a run", "one step", "odd rewards"],
)
def test_the_image_is_a_png_with_the_curve_on_it(
    rewards: Sequence[float], evaluations: Mapping[int, tuple[float, float, float]], tmp_path: Path
) -> None:
    path = tmp_path / "reward.png"
    reward_curve_png(path, range(1, len(rewards) + 1), rewards, evaluations)
    image = matplotlib.image.imread(path)
    assert image.shape[:2] == (675, 1200)
    red, blue = image[..., 0] - image[..., 2] > 0.4, image[..., 2] - image[..., 0] > 0.2
    assert blue.any()
    assert red.any() == bool(evaluations)
    if len(rewards) == 60:  # the line runs from the lower left to the upper right
        left, right = (blue[100:600, columns].nonzero()[0].mean() for columns in (slice(100, 300), slice(900, 1100)))
        assert left > right + 150
    assert os.listdir(tmp_path) == ["reward.png"]


def test_a_curve_may_begin_at_a_later_step() -> None:
    assert reward_curve_text([0.1, 0.2, 0.3], 40, 4, first=41).splitlines()[-1].split() == ["41", "step", "43"]


def test_a_loss_has_an_axis_apart_from_the_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    monkeypatch.setattr("rlcli.runs.tracking.plots.replacing", lambda path: contextlib.nullcontext(path))
    reward_curve_png(tmp_path / "loss.png", [1, 2, 3], [5.0, 3.0, 2.0], {0: (0.0, 0.0, 0.1), 3: (0.5, 0.4, 0.6)}, LOSS)
    reward_curve_png(tmp_path / "reward.png", [1, 2, 3], [0.1, 0.2, 0.3], {0: (0.0, 0.0, 0.1)})
    loss, rates = figures[0].axes
    assert (loss.get_ylabel(), rates.get_ylabel()) == ("loss (nats a token)", "pass@1")
    assert loss.get_ylim()[1] > 5.0
    assert rates.get_ylim() == (0.0, 1.02)
    labels = {text.get_text() for text in rates.get_legend().get_texts()}
    assert labels == {"loss of a step", "held-out pass@1 with 95% interval"}
    (reward,) = figures[1].axes
    assert reward.get_ylabel() == "mean reward, pass@1"


def test_a_step_after_which_files_changed_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = [Mark(4, "mine.py changed after step 4"), Mark(10, "a$b$.py changed after step 10")]
    lines = reward_curve_text(RISING[:10], 40, 4, marks=marks).splitlines()
    assert [line for line in lines if "▲" in line][1:] == ["▲ mine.py changed after step 4"], (
        "nothing is after step 10 yet"
    )
    axis = lines[4].partition("└")[2]
    assert axis.index("▲") == round(3.5 / 9 * (len(axis) - 1))
    assert "▲" not in reward_curve_text(RISING[:10], 40, 4, first=5, marks=marks[:1])
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    monkeypatch.setattr("rlcli.runs.tracking.plots.replacing", lambda path: contextlib.nullcontext(path))
    reward_curve_png(tmp_path / "reward.png", range(1, 11), RISING[:10], {}, marks=marks)
    (axes,) = figures[0].axes
    assert [line.get_xdata()[0] for line in axes.get_lines()[1:]] == [4.5, 10.5]
    assert marks[0].text in {text.get_text() for text in axes.get_legend().get_texts()}


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *rest, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SetupError, match=r"needs matplotlib; pip install 'rlcli\[cpu\]'"):
        reward_curve_png(tmp_path / "a.png", [1], [0.5], {})
