"""Coefficients that follow a measurement."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.algorithms.controllers import EntropyController, KlController

measurements = st.lists(st.floats(-10.0, 10.0), max_size=20)


@given(kls=measurements, coef=st.floats(0.0, 2.0), target=st.floats(0.01, 10.0), samples=st.integers(1, 50_000))
def test_the_kl_coefficient_follows_the_rule_of_the_paper(
    kls: list[float], coef: float, target: float, samples: int
) -> None:
    controller, expected = KlController(coef, target), coef
    for kl in kls:
        error = kl / target - 1
        error = -0.2 if error < -0.2 else 0.2 if error > 0.2 else error
        expected += expected * error * (samples / 10_000 if samples < 10_000 else 1)
        controller.update(kl, samples)
        assert controller.coef == pytest.approx(expected, rel=1e-12, abs=1e-300)
        assert controller.coef >= 0


def test_the_kl_coefficient_goes_the_right_way_and_rests_at_the_target() -> None:
    for kl, expected in ((9.0, 0.11), (2.2, 0.105), (2.0, 0.1), (1.8, 0.095), (-3.0, 0.09)):
        controller = KlController(coef=0.1, target=2.0, horizon=200)
        controller.update(kl, samples=100)
        assert controller.coef == pytest.approx(expected)


def test_a_closed_loop_brings_the_kl_to_its_target() -> None:
    """Where the KL answers inversely to the coefficient."""
    controller = KlController(coef=1.0, target=0.05, horizon=1000)
    for _ in range(300):
        controller.update(0.01 / controller.coef, samples=500)
    assert 0.01 / controller.coef == pytest.approx(0.05, rel=1e-3)


@given(entropies=measurements, coef=st.floats(0.0, 0.1), target=st.floats(0.01, 5.0), step=st.floats(0.001, 0.1))
def test_the_entropy_coefficient_follows_the_rule_of_the_paper(
    entropies: list[float], coef: float, target: float, step: float
) -> None:
    controller, level = EntropyController(coef, target, step), coef
    for entropy in entropies:
        if entropy < target:
            level = level + step
        if entropy > target:
            level = level - step if level > step else 0.0
        controller.update(entropy, samples=64)
        assert controller.coef == pytest.approx(level if entropy <= target else 0.0, abs=1e-12)


def test_the_entropy_coefficient_rests_at_the_target() -> None:
    controller = EntropyController(coef=0.01, target=0.2)
    controller.update(0.2, samples=1)
    assert controller.coef == 0.01


@pytest.mark.parametrize("kind", [KlController, EntropyController])
def test_without_a_target_nothing_moves_the_coefficient(kind: type[KlController] | type[EntropyController]) -> None:
    controller = kind(coef=0.25)
    controller.update(1e9, samples=10_000)
    assert controller.coef == 0.25
    controller.restore({"coef": 7.0, "level": 7.0})
    assert controller.coef == 0.25


@pytest.mark.parametrize("kind", [KlController, EntropyController])
@given(earlier=measurements, following=measurements)
def test_a_restored_controller_goes_on_as_the_one_that_was_saved(
    kind: type[KlController] | type[EntropyController], earlier: list[float], following: list[float]
) -> None:
    first, second = kind(coef=0.01, target=0.2), kind(coef=3.0, target=0.2)
    for measured in earlier:
        first.update(measured, samples=100)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.coef == first.coef
    for measured in following:
        first.update(measured, samples=100)
        second.update(measured, samples=100)
        assert second.coef == first.coef


def test_a_fixed_coefficient_hands_over_to_an_adaptive_one() -> None:
    adaptive = EntropyController(coef=0.5, target=0.2)
    adaptive.restore(EntropyController(coef=0.01).state())
    adaptive.update(0.1, samples=1)
    assert adaptive.coef == pytest.approx(0.015)
