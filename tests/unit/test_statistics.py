from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.trainer.statistics import Estimate, interval, pass_at_k, summarise


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(n: int) -> None:
    for c in range(n + 1):
        right = [index < c for index in range(n)]
        for k in range(1, n + 1):
            subsets = list(combinations(right, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_exact_where_binomials_overflow_floats() -> None:
    n, c, k = 10_000, 3, 5_000
    exact = (comb(n, k) - comb(n - c, k)) / comb(n, k)
    assert pass_at_k(n, c, k) == pytest.approx(exact, rel=1e-12)
    assert pass_at_k(10_000, 0, 100) == 0.0
    assert pass_at_k(10_000, 7, 1) == 7 / 10_000


@given(st.integers(1, 300), st.data())
def test_pass_at_k_is_a_probability_that_grows_with_k_and_c(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n - 1))
    k = data.draw(st.integers(1, n))
    value = pass_at_k(n, c, k)
    assert 0.0 <= value <= 1.0
    assert pass_at_k(n, c + 1, k) >= value
    if k < n:
        assert pass_at_k(n, c, k + 1) >= value - 1e-12


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=50))
def test_an_interval_has_width_and_holds_the_mean(values: list[float]) -> None:
    found = interval(values)
    assert 0.0 <= found.low <= found.mean <= found.high <= 1.0
    assert found.high - found.low > 0.0


def test_sixty_four_equal_scores_do_not_claim_certainty() -> None:
    zeros, ones = interval([0.0] * 64), interval([1.0] * 64)
    # Jeffreys' upper end is 0.0386 (exact Clopper-Pearson: 0.056).
    assert zeros.low == 0.0
    assert zeros.high == pytest.approx(0.0386, abs=0.002)
    assert ones.high == 1.0
    assert ones.low == pytest.approx(1 - 0.0386, abs=0.002)


def test_one_sample_a_prompt_gives_the_jeffreys_interval() -> None:
    # Quantiles of Beta(10.5, 40.5), from tables of the incomplete beta function by numerical integration.
    grid = np.linspace(0.0, 1.0, 200_001)[1:-1]
    density = grid**9.5 * (1 - grid) ** 39.5
    cumulative = np.cumsum(density) / density.sum()
    low, high = (float(grid[np.searchsorted(cumulative, q)]) for q in (0.025, 0.975))
    found = interval([1.0] * 10 + [0.0] * 40)
    assert found.low == pytest.approx(low, abs=0.005)
    assert found.high == pytest.approx(high, abs=0.005)


def test_many_prompts_give_the_percentile_bootstrap() -> None:
    generator = np.random.default_rng(5)
    values = generator.binomial(4, generator.beta(1, 2, size=1000)) / 4
    means = [generator.choice(values, size=len(values)).mean() for _ in range(4000)]
    low, high = np.quantile(means, [0.025, 0.975])
    found = interval([float(value) for value in values])
    assert found.low == pytest.approx(low, abs=0.003)
    assert found.high == pytest.approx(high, abs=0.003)


@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5, 0.9])
def test_intervals_hold_the_true_rate_about_95_times_in_100(rate: float, samples: int) -> None:
    generator = np.random.default_rng(11)
    held, runs = 0, 200
    for run in range(runs):
        # Prompts differ in difficulty: most are nearly always or nearly never solved.
        difficulty = generator.beta(rate / 2, (1 - rate) / 2, size=64)
        found = interval([float(v) for v in generator.binomial(samples, difficulty) / samples], seed=run)
        held += found.low <= rate <= found.high
    assert held / runs > 0.90


def test_a_seed_gives_the_same_interval_again() -> None:
    values = [0.0, 0.5, 1.0, 0.25]
    assert interval(values, seed=3) == interval(values, seed=3)
    assert interval(values, seed=3) != interval(values, seed=4)


def test_a_summary_counts_and_always_has_pass_at_1() -> None:
    report = summarise([[True, False, False, False], [False] * 4, [True] * 4], ks=[4])
    assert (report.prompts, report.samples) == (3, 12)
    assert report.passed[1].mean == pytest.approx(5 / 12)
    assert report.passed[4].mean == pytest.approx(2 / 3)
    assert set(report.metrics()) >= {"pass@1", "pass@1/low", "pass@1/high", "pass@4", "prompts", "samples"}


def test_asking_for_more_than_was_sampled_is_refused() -> None:
    with pytest.raises(AssertionError):
        summarise([[True, False]], ks=[3])
    with pytest.raises(AssertionError):
        summarise([])


def test_an_estimate_prints_in_percent() -> None:
    assert str(Estimate(0.125, 0.0, 1.0)) == "12.5% [0.0, 100.0]"
