from __future__ import annotations

from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.evaluation import statistics
from rlcli.evaluation.statistics import (
    Estimate,
    average_of,
    interval,
    majorities,
    pass_at_k,
    pass_rates,
    sign_flip,
)


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
    estimate = interval(values)
    assert 0.0 <= estimate.low <= estimate.mean <= estimate.high <= 1.0
    assert estimate.high - estimate.low > 0.0


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
    estimate = interval([1.0] * 10 + [0.0] * 40)
    assert estimate.low == pytest.approx(low, abs=0.005)
    assert estimate.high == pytest.approx(high, abs=0.005)


def test_many_prompts_give_the_percentile_bootstrap() -> None:
    generator = np.random.default_rng(5)
    values = generator.binomial(4, generator.beta(1, 2, size=1000)) / 4
    means = [generator.choice(values, size=len(values)).mean() for _ in range(4000)]
    low, high = np.quantile(means, [0.025, 0.975])
    estimate = interval([float(value) for value in values])
    assert estimate.low == pytest.approx(low, abs=0.003)
    assert estimate.high == pytest.approx(high, abs=0.003)


@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5, 0.9])
def test_intervals_hold_the_true_rate_about_95_times_in_100(rate: float, samples: int) -> None:
    generator = np.random.default_rng(11)
    held, runs = 0, 200
    for run in range(runs):
        # Prompts differ in difficulty: most are nearly always or nearly never solved.
        difficulty = generator.beta(rate / 2, (1 - rate) / 2, size=64)
        estimate = interval([float(v) for v in generator.binomial(samples, difficulty) / samples], seed=run)
        held += estimate.low <= rate <= estimate.high
    assert held / runs > 0.90


def test_a_seed_gives_the_same_interval_again() -> None:
    values = [0.0, 0.5, 1.0, 0.25]
    assert interval(values, seed=3) == interval(values, seed=3)
    assert interval(values, seed=3) != interval(values, seed=4)


def test_pass_rates_are_pass_at_k_prompt_by_prompt() -> None:
    generator = np.random.default_rng(2)
    counts = generator.integers(3, 9, size=50)
    right = generator.integers(0, counts + 1)
    for k in (1, 2, 3):
        expected = [pass_at_k(int(n), int(c), k) for n, c in zip(counts, right, strict=True)]
        assert pass_rates(counts, right, k).tolist() == expected
    with pytest.raises(AssertionError):
        pass_rates(counts, right, 9)


def majority_by_loops(answers: list[int], passed: list[bool], k: int) -> float:
    """maj@k as its definition says it: every subset, every vote, ties shared."""
    worths = []
    for subset in combinations(range(len(answers)), k):
        votes = [answers[index] for index in subset if answers[index] >= 0]
        top_count = max((votes.count(answer) for answer in votes), default=0)
        winners = sorted({answer for answer in votes if votes.count(answer) == top_count})
        right = []
        for winner in winners:
            winner_passed = [passed[index] for index, answer in enumerate(answers) if answer == winner]
            right.append(sum(winner_passed) / len(winner_passed))
        worths.append(sum(right) / len(right) if right else 0.0)
    return sum(worths) / len(worths)


def drawn_prompts(seed: int, sizes: list[int], answers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """prompt, answer, passed of samples in a random order; answer 0 is right, -1 is none."""
    generator = np.random.default_rng(seed)
    prompt = np.repeat(np.arange(len(sizes)), sizes)
    answer = generator.integers(-1, answers, size=len(prompt))
    order = generator.permutation(len(prompt))
    return prompt[order], answer[order] * 7, answer[order] == 0


@pytest.mark.parametrize("sizes", [[1], [5], [2, 5, 3], [6, 6, 6, 6], [2, 8]])
def test_majority_votes_are_those_of_all_subsets(sizes: list[int]) -> None:
    prompt, answer, passed = drawn_prompts(3, sizes, answers=3)
    ks = list(range(1, min(sizes) + 1))
    votes_by_k = majorities(prompt, answer, passed, len(sizes), ks)
    for k in ks:
        values, exact = votes_by_k[k]
        assert exact
        expected = [
            majority_by_loops(answer[prompt == index].tolist(), passed[prompt == index].tolist(), k)
            for index in range(len(sizes))
        ]
        assert values.tolist() == pytest.approx(expected)


def test_majority_votes_over_random_subsets_come_near_those_over_all() -> None:
    prompt, answer, passed = drawn_prompts(4, [12] * 40, answers=4)
    values, exact = majorities(prompt, answer, passed, 40, [5])[5]
    assert not exact
    masks = [prompt == index for index in range(40)]
    expected = [majority_by_loops(answer[mask].tolist(), passed[mask].tolist(), 5) for mask in masks]
    assert values.tolist() == pytest.approx(expected, abs=0.05)
    assert values.mean() == pytest.approx(np.mean(expected), abs=0.006)
    repeated, _ = majorities(prompt, answer, passed, 40, [5])[5]
    assert repeated.tolist() == values.tolist()


def test_a_vote_without_an_answer_is_none() -> None:
    silent = np.full(4, -1)
    assert majorities(np.zeros(4, int), silent, np.zeros(4, bool), 1, [4])[4][0].tolist() == [0.0]
    # One voice among three that say nothing decides.
    lone = np.array([-1, 5, -1, -1])
    assert majorities(np.zeros(4, int), lone, lone == 5, 1, [4])[4][0].tolist() == [1.0]


def test_ties_are_worth_the_mean_of_what_is_tied() -> None:
    answers = np.array([1, 1, 2, 2, 3])
    assert majorities(np.zeros(5, int), answers, answers == 1, 1, [5])[5][0].tolist() == [0.5]
    assert majorities(np.zeros(5, int), answers, answers == 3, 1, [5])[5][0].tolist() == [0.0]


def test_more_prompts_than_are_held_at_once_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, answer, passed = drawn_prompts(6, [4] * 30, answers=3)
    undivided = majorities(prompt, answer, passed, 30, [2, 4])
    monkeypatch.setattr(statistics, "AT_ONCE", 7)
    parts = majorities(prompt, answer, passed, 30, [2, 4])
    assert [parts[k][0].tolist() for k in (2, 4)] == [undivided[k][0].tolist() for k in (2, 4)]


def test_scores_beyond_one_widen_the_bounds() -> None:
    estimate = interval([1.1] * 20, bounds=(0.0, 1.1))
    assert estimate.mean == pytest.approx(1.1)
    assert estimate.low < 1.1
    with pytest.raises(AssertionError):
        interval([1.1] * 20)


def test_many_different_values_give_the_interval_of_few() -> None:
    values = np.random.default_rng(7).random(4000)
    estimate = interval(values)
    spread = 1.96 * values.std() / np.sqrt(len(values))
    assert estimate.mean == pytest.approx(values.mean())
    assert (estimate.low, estimate.high) == pytest.approx((values.mean() - spread, values.mean() + spread), abs=0.002)


def test_the_average_of_datasets_counts_each_the_same() -> None:
    average = average_of([np.zeros(900), np.ones(100)])
    assert average.mean == pytest.approx(0.5)
    assert average.low > 0.4
    assert average_of([np.array([0.0, 1.0])]) == interval([0.0, 1.0])


def test_few_differences_are_flipped_in_every_way() -> None:
    differences = np.array([0.5, -0.25, 0.0, 0.75, 0.25])
    moved = [0.5, -0.25, 0.75, 0.25]
    sums = [abs(sum(s * d for s, d in zip(signs, moved, strict=True))) for signs in product((1, -1), repeat=4)]
    assert sign_flip(differences) == pytest.approx(sum(total >= 1.25 for total in sums) / 16)
    assert sign_flip(np.zeros(9)) == 1.0


def test_many_differences_give_the_p_value_of_a_sign_test() -> None:
    # 30 pairs better and 14 worse by as much: a binomial test.
    differences = np.array([1.0] * 30 + [-1.0] * 14 + [0.0] * 100)
    exact = 2 * sum(comb(44, wins) for wins in range(30, 45)) / 2**44
    assert sign_flip(differences) == pytest.approx(exact, abs=0.006)
    assert sign_flip(np.ones(200)) == pytest.approx(1 / (statistics.PERMUTATIONS + 1))


@pytest.mark.long
def test_without_a_difference_the_p_value_is_even() -> None:
    generator = np.random.default_rng(9)
    p_values = [sign_flip(generator.integers(-4, 5, size=60) / 4) for _ in range(200)]
    assert 0.01 <= np.mean(np.array(p_values) < 0.05) <= 0.1


def test_an_estimate_prints_in_percent() -> None:
    assert str(Estimate(0.125, 0.0, 1.0)) == "12.5% [0.0, 100.0]"
