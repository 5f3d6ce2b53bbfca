"""The posterior of each prompt's pass rate against plain sums over its groups."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.data.prompts.pass_rates import PassRates

COUNT = 5
events = st.lists(
    st.one_of(
        st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=4),  # a draw
        st.tuples(st.integers(0, COUNT - 1), st.integers(0, 8), st.integers(0, 8)),  # a group: right and wrong
    ),
    max_size=30,
)


def played(some: list[object], decay: float, retire: int = 0) -> PassRates:
    rates = PassRates(COUNT, decay, retire)
    for event in some:
        if isinstance(event, list):
            rates.draw(event)
        elif isinstance(event, tuple):
            rates.observe(event[0], event[1], event[1] + event[2])
    return rates


@given(some=events, decay=st.floats(0.0, 1.0))
def test_the_posterior_is_the_decayed_sum_over_groups(some: list[object], decay: float) -> None:
    a, b = played(some, decay).posterior()
    for prompt in range(COUNT):
        alpha = beta = 1.0
        for position, event in enumerate(some):
            if isinstance(event, tuple) and event[0] == prompt:
                later_draws = sum(len(other) for other in some[position:] if isinstance(other, list))
                alpha += event[1] * decay ** (later_draws / COUNT)
                beta += event[2] * decay ** (later_draws / COUNT)
        assert a[prompt] == pytest.approx(alpha, rel=1e-9)
        assert b[prompt] == pytest.approx(beta, rel=1e-9)


@given(some=events, following=events, retire=st.integers(0, 2))
def test_restored_rates_are_the_same_bits(some: list[object], following: list[object], retire: int) -> None:
    rates = played(some, 0.3, retire)
    restored = PassRates(COUNT, 0.3, retire).restored(json.loads(json.dumps(rates.state())))
    for event in following:
        for each in (rates, restored):
            each.draw(event) if isinstance(event, list) else each.observe(event[0], event[1], event[1] + event[2])
    assert [side.tolist() for side in rates.posterior()] == [side.tolist() for side in restored.posterior()]
    assert rates.retired().tolist() == restored.retired().tolist()
    assert rates.drawn_at.tolist() == restored.drawn_at.tolist()


def test_groups_in_a_row_without_a_wrong_sample_retire_a_prompt() -> None:
    rates = PassRates(3, 0.5, retire=2)
    for right, counted, retired in ((8, 8, False), (7, 8, False), (8, 8, False), (0, 0, False), (6, 6, True)):
        rates.observe(1, right, counted)
        assert rates.retired().tolist() == [False, retired, False], (right, counted)
    rates.bring_back()
    assert not rates.retired().any()
    rates.observe(1, 8, 8)
    assert rates.retired()[1]
    assert not PassRates(3, 0.5).retired().any()


def test_a_group_of_which_nothing_was_judged_changes_nothing() -> None:
    rates = PassRates(2, 0.5)
    rates.draw([0])
    rates.observe(0, 0, 0)
    assert [side.tolist() for side in rates.posterior()] == [[1.0, 1.0]] * 2
    assert rates.known().tolist() == [True, False]
    assert isinstance(rates.known(), np.ndarray)
