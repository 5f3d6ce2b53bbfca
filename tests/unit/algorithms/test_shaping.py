"""Additions to the reward against plain-Python references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.algorithms.shaping import length_reward, overlong, soft_format

relaxed = settings(deadline=None)  # the first call of a torch operation is slow


def overlong_reference(length: int, max_length: int, buffer: int, penalty: float) -> float:
    """The three cases of the paper."""
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return ((max_length - buffer) - length) / buffer * penalty
    return -penalty


@relaxed
@given(
    lengths=st.lists(st.integers(0, 30), max_size=8),
    max_length=st.integers(1, 25),
    data=st.data(),
    penalty=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_overlong_equals_the_cases_of_the_paper(
    lengths: list[int], max_length: int, data: st.DataObject, penalty: float
) -> None:
    buffer = data.draw(st.integers(1, max_length))
    got = overlong(torch.tensor(lengths, dtype=torch.int64), max_length=max_length, buffer=buffer, penalty=penalty)
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx([overlong_reference(n, max_length, buffer, penalty) for n in lengths])


def test_dapo_s_own_numbers() -> None:
    lengths = torch.tensor([16384, 18432, 20480])
    assert overlong(lengths, max_length=20480, buffer=4096).tolist() == [0.0, -0.5, -1.0]


def test_a_buffer_of_zero_penalises_nothing() -> None:
    assert overlong(torch.tensor([0, 99, 100]), max_length=100, buffer=0).tolist() == [0.0] * 3


def length_reference(correct: bool, length: int, lengths: list[int]) -> float:
    if max(lengths) == min(lengths):
        return 0.0
    rise = 0.5 - (length - min(lengths)) / (max(lengths) - min(lengths))
    return rise if correct else min(0.0, rise)


@relaxed
@given(
    samples=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.sampled_from([-7, 2, 2**40])), max_size=12),
    weight=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_length_reward_equals_the_reference_for_groups_in_any_order(
    samples: list[tuple[bool, int, int]], weight: float
) -> None:
    inside: dict[int, list[int]] = {}
    for _, length, group in samples:
        inside.setdefault(group, []).append(length)
    got = length_reward(
        torch.tensor([correct for correct, _, _ in samples], dtype=torch.bool),
        torch.tensor([length for _, length, _ in samples], dtype=torch.int64),
        torch.tensor([group for _, _, group in samples], dtype=torch.int64),
        weight=weight,
    )
    expected = [weight * length_reference(correct, length, inside[group]) for correct, length, group in samples]
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(expected, abs=1e-12)


def test_equal_lengths_and_lone_responses_get_exactly_nothing() -> None:
    got = length_reward(torch.tensor([True, False, True]), torch.tensor([5, 5, 9]), torch.tensor([0, 0, 1]), weight=1.0)
    assert got.tolist() == [0.0] * 3


def test_format_counts_whether_or_not_the_answer_is_right() -> None:
    got = soft_format(torch.tensor([1.0, 0.0, 0.5], dtype=torch.float32), weight=0.2)
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx([0.2, 0.0, 0.1])
