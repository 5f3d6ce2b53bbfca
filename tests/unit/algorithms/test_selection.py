"""Selection of the samples to train on and of the groups to keep."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.algorithms import selection
from rlcli.algorithms.function_registry import options_of
from rlcli.algorithms.selection import keep_groups
from rlcli.errors import UnknownName

relaxed = settings(deadline=None)  # the first call of a torch operation is slow
NAMES = ["all", "best_random", "best_worst", "pairs", "right"]
labels = st.sampled_from([-7, 3, 2**40])
rewards = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(-3.0, 3.0)
Samples = list[tuple[float, int]]  # (reward, group label)
steps = st.lists(st.tuples(rewards, labels), max_size=12)


def tensors(samples: Samples, seed: int = 0) -> dict[str, Any]:
    return {
        "rewards": torch.tensor([reward for reward, _ in samples], dtype=torch.float64),
        "groups": torch.tensor([group for _, group in samples], dtype=torch.int64),
        "generator": torch.Generator().manual_seed(seed),
    }


def select(name: str, samples: Samples, seed: int = 0, **options: float) -> list[int]:
    indices = selection.part(name, options)(*tensors(samples, seed).values())
    assert indices.dtype == torch.int64
    return [int(index) for index in indices.tolist()]


def members(samples: Samples) -> list[list[int]]:
    order = list(dict.fromkeys(group for _, group in samples))
    return [[i for i, (_, group) in enumerate(samples) if group == label] for label in order]


def test_every_selection_is_offered_and_proven_here() -> None:
    assert selection.names() == NAMES


@relaxed
@given(samples=steps)
def test_all_takes_every_sample_once_group_after_group(samples: Samples) -> None:
    assert select("all", samples) == [i for group in members(samples) for i in group]


@relaxed
@given(samples=steps, above=st.sampled_from([0.5, 0.0, 0.75]))
def test_right_takes_those_above_the_threshold(samples: Samples, above: float) -> None:
    expected = [i for group in members(samples) for i in group if samples[i][0] > above]
    assert select("right", samples, right_above=above) == expected
    assert options_of(selection.get("right")) == {"right_above": 0.5}


@relaxed
@given(samples=steps)
def test_pairs_takes_the_first_best_and_the_first_worst_of_unequal_groups(samples: Samples) -> None:
    expected = []
    for group in members(samples):
        best = worst = group[0]
        for i in group:
            best = i if samples[i][0] > samples[best][0] else best
            worst = i if samples[i][0] < samples[worst][0] else worst
        expected += [best, worst] if best != worst else []
    assert select("pairs", samples) == expected


@pytest.mark.parametrize("name", ["best_random", "best_worst"])
@relaxed
@given(samples=steps, seed=st.integers(0, 2**32))
def test_a_draw_stays_in_its_group_and_depends_on_the_seed_alone(name: str, samples: Samples, seed: int) -> None:
    indices = select(name, samples, seed)
    assert indices == select(name, samples, seed)
    start = 0
    for group in members(samples):
        part = indices[start : start + len(group)]
        assert len(part) == len(group)
        assert set(part) <= set(group)
        assert part == sorted(part)
        start += len(group)
    assert start == len(indices)


CHANCES = [  # rewards of a group, chances under best_random, chances under best_worst
    ([1.0, 0.5, 0.2, 0.1, 0.0], [1 / 2, 1 / 8, 1 / 8, 1 / 8, 1 / 8], [1 / 2, 0, 0, 0, 1 / 2]),
    ([0.0, 1.0, 1.0, 0.5], [1 / 4, 1 / 4, 1 / 4, 1 / 4], [1 / 2, 1 / 4, 1 / 4, 0]),
    ([0.0, 1.0, 0.0], [1 / 4, 1 / 2, 1 / 4], [1 / 4, 1 / 2, 1 / 4]),
    ([0.3, 0.3], [1 / 2, 1 / 2], [1 / 2, 1 / 2]),
    ([0.7], [1.0], [1.0]),
]


@pytest.mark.long
@pytest.mark.parametrize(("group", "random", "worst"), CHANCES)
def test_draws_have_the_chances_of_the_paper(group: list[float], random: list[float], worst: list[float]) -> None:
    """Over 4,000 copies of the group; 0.02 is more than four standard deviations."""
    samples = [(reward, label) for label in range(4000) for reward in group]
    for name, chances in (("best_random", random), ("best_worst", worst)):
        counts = Counter(index % len(group) for index in select(name, samples))
        shares = [counts[position] / len(samples) for position in range(len(group))]
        assert shares == pytest.approx(chances, abs=0.02)
        assert all(share == 0 for share, chance in zip(shares, chances, strict=True) if chance == 0)


def test_an_unknown_selection_is_refused_with_the_near_ones() -> None:
    with pytest.raises(UnknownName, match=r"'pair'.*pairs"):
        selection.get("pair")


# --- which groups are kept --------------------------------------------------------------------------------------------


def kept_reference(keep: str, inside: list[float], low: float, high: float) -> bool:
    if keep == "unequal":
        return len(set(inside)) > 1
    return keep == "all" or low * len(inside) <= sum(inside) <= high * len(inside)


@pytest.mark.parametrize("keep", ["all", "unequal", "accuracy"])
@relaxed
@given(samples=st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), labels), max_size=12))
def test_a_group_is_kept_whole_or_not_at_all(keep: Literal["all", "unequal", "accuracy"], samples: Samples) -> None:
    inputs = tensors(samples)
    got = keep_groups(inputs["rewards"], inputs["groups"], keep=keep, low=0.25, high=0.75)
    expected = [False] * len(samples)
    for group in members(samples):
        for i in group:
            expected[i] = kept_reference(keep, [samples[j][0] for j in group], 0.25, 0.75)
    assert got.dtype == torch.bool
    assert got.tolist() == expected


@pytest.mark.parametrize(("right", "passes"), [(0, False), (1, True), (4, True), (5, False)])
def test_the_bounds_of_the_accuracy_are_kept(right: int, passes: bool) -> None:
    scores = torch.tensor([1.0] * right + [0.0] * (5 - right))
    got = keep_groups(scores, torch.zeros(5, dtype=torch.int64), keep="accuracy", low=0.2, high=0.8)
    assert got.tolist() == [passes] * 5
