"""Prompt sampling: by posteriors, deterministic, and never a retired or resting prompt without need."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.config.schema import Data, Rollout, RunConfig, Train, WeightedPath
from rlcli.data.prompts.cursor import PromptCursor
from rlcli.data.prompts.dataset_mixture import MixedCursor, build_cursor
from rlcli.data.prompts.pass_rates import DECAY
from rlcli.data.prompts.prompt_selection import REST_STEPS, SHARPNESS, SelectingCursor, difficulty, thompson
from rlcli.data.prompts.prompt_table import JoinedPrompts
from rlcli.errors import DataError
from rlcli.types import Prompt

A, B = np.array([1.0, 5.0, 9.0, 1.0, 2.5]), np.array([1.0, 5.0, 1.0, 9.0, 7.0])
DRAWS = 4000


def cursor_by(rule: Any, count: int = 40, **options: Any) -> SelectingCursor:
    arguments = {"decay": 0.5, "retire": 0, "rest": 8} | options
    return SelectingCursor(count, seed=3, shuffle=True, rule=rule, **arguments)


def drawn_first(rule: Any) -> list[float]:
    rng = np.random.default_rng(1)
    counted = Counter(int(rule(A, B, 1, rng)[0]) for _ in range(DRAWS))
    return [counted[index] / DRAWS for index in range(len(A))]


def beta_variance_term(a: float, b: float) -> float:
    """E[p (1 − p)] under Beta(a, b), as a sum over a grid of densities."""
    grid = [(i + 0.5) / 20_000 for i in range(20_000)]
    density = [p ** (a - 1.0) * (1.0 - p) ** (b - 1.0) for p in grid]
    return sum(d * p * (1.0 - p) for d, p in zip(density, grid, strict=True)) / sum(density)


def test_difficulty_draws_by_the_expected_variance_to_its_power() -> None:
    weights = [(4.0 * beta_variance_term(a, b)) ** SHARPNESS for a, b in zip(A.tolist(), B.tolist(), strict=True)]
    for share, weight in zip(drawn_first(difficulty), weights, strict=True):
        expected = weight / sum(weights)
        assert share == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / DRAWS) + 1e-3)


def test_thompson_takes_the_drawn_rates_nearest_to_one_half() -> None:
    rng, reference_rng = np.random.default_rng(7), np.random.default_rng(7)
    rates = reference_rng.beta(A, B).tolist()
    nearest = sorted(range(len(A)), key=lambda index: abs(rates[index] - 0.5))
    assert thompson(A, B, 3, rng).tolist() == nearest[:3]
    shares = drawn_first(thompson)
    assert shares[1] > shares[0] > shares[4] > max(shares[2], shares[3])
    assert min(shares[2], shares[3]) > 0.0


@pytest.mark.parametrize("rule", ["thompson", "difficulty"])
def test_prompts_solved_sometimes_are_drawn_most(rule: str) -> None:
    cursor, draw_counts = cursor_by(rule), Counter[int]()
    for _ in range(60):
        for index in cursor.take(6):
            right = {0: 0, 1: 4, 2: 8}[index % 3]
            cursor.record_group(index, 100, right, 8)
            draw_counts[index % 3] += 1
    assert draw_counts[1] > 2.5 * max(draw_counts[0], draw_counts[2])
    assert min(draw_counts[0], draw_counts[2]) > 14, "evidence decays, so the others are tried again"


takes = st.lists(st.integers(0, 12), min_size=1, max_size=12)
rules = st.sampled_from(["uniform", "thompson", "difficulty"])


def judge(cursor: SelectingCursor | MixedCursor, indices: list[int], skip: int) -> None:
    for index in indices[skip:]:  # some groups are not finished when the checkpoint is taken
        cursor.record_group(index, 10, min(8, index % 11), 8)


@given(rule=rules, sizes=takes, retire=st.integers(0, 2), count=st.integers(1, 30))
@settings(max_examples=80)
def test_a_restored_cursor_goes_on_exactly(rule: Any, sizes: list[int], retire: int, count: int) -> None:
    continuous, resumed = (cursor_by(rule, count, retire=retire) for _ in range(2))
    for step, n in enumerate(sizes):
        indices, resumed_indices = continuous.take(n), resumed.take(n)
        assert indices == resumed_indices
        assert len(indices) == n
        assert set(indices) <= set(range(count))
        judge(continuous, indices, step % 3)
        judge(resumed, resumed_indices, step % 3)
        resumed = cursor_by(rule, count, retire=retire).restored(json.loads(json.dumps(resumed.state())))
    assert continuous.state() == resumed.state()


def test_uniform_walks_as_without_selection_until_a_prompt_is_retired() -> None:
    walk, cursor = PromptCursor(20, 3, True), cursor_by("uniform", 20, retire=1)
    assert cursor.take(30) == walk.take(30)
    for index in range(10):
        cursor.record_group(index, 1, 8, 8)
    assert cursor.take(25) == [index for index in walk.take(50) if index >= 10][:25]
    assert cursor.metrics() == {"prompts/seen": 1.0, "prompts/retired": 0.5}


@pytest.mark.parametrize("rule", ["uniform", "thompson", "difficulty"])
def test_retired_prompts_come_back_when_all_are(rule: Any) -> None:
    cursor = cursor_by(rule, 6, retire=1, rest=0)
    for index in range(5):
        cursor.record_group(index, 1, 8, 8)
    assert cursor.take(3) == [5, 5, 5]
    cursor.record_group(5, 1, 8, 8)
    assert cursor.metrics()["prompts/retired"] == 1.0
    assert len(set(cursor.take(6))) == 6


@pytest.mark.parametrize("rule", ["thompson", "difficulty"])
def test_a_drawn_prompt_rests_while_others_are_drawn(rule: Any) -> None:
    cursor = cursor_by(rule, 20, rest=10)
    indices: list[int] = []
    for _ in range(40):
        indices += cursor.take(2)
        for index in indices[-2:]:
            cursor.record_group(index, 1, 4, 8)
    for position, index in enumerate(indices):
        assert index not in indices[max(0, position - 9) : position]
    alone = cursor_by(rule, 3, rest=10)
    assert sorted(alone.take(3)) == [0, 1, 2], "more at once than are awake: each once, as long as there are others"
    assert alone.rest == 1


def test_the_order_depends_on_the_seed_and_on_no_global_state() -> None:
    np.random.seed(1)
    first = cursor_by("thompson", 50).take(20)
    np.random.seed(2)
    assert cursor_by("thompson", 50).take(20) == first
    other = SelectingCursor(50, seed=4, shuffle=True, rule="thompson", decay=0.5, retire=0, rest=8)
    assert other.take(20) != first


def test_a_state_of_another_rule_is_refused() -> None:
    thompson_state = cursor_by("thompson").state()
    for cursor, state, says in (
        (cursor_by("thompson"), PromptCursor(40, 3, True).state(), "by data.sampling = uniform and now has thompson"),
        (cursor_by("difficulty"), thompson_state, "by data.sampling = thompson and now has difficulty"),
        (PromptCursor(40, 3, True), thompson_state, "began with data.sampling = thompson or data.retire"),
        (cursor_by("thompson", 41), thompson_state, "began on 40 prompts and the dataset now has 41"),
    ):
        with pytest.raises(DataError, match=says):
            cursor.restored(state)


def config_of(*weights: float, **data: Any) -> RunConfig:
    paths = tuple(WeightedPath(path=str(number), weight=weight) for number, weight in enumerate(weights))
    return RunConfig(data=Data(path=paths, **data), train=Train(seed=3), rollout=Rollout(prompts_per_step=6))


def test_the_config_chooses_the_cursor_of_one_set_and_of_each_of_several() -> None:
    prompts = [Prompt(str(i), (), "s", "", "math", "") for i in range(60)]
    cursor = build_cursor(prompts, config_of(sampling="difficulty", retire=3))
    assert isinstance(cursor, SelectingCursor)
    assert (cursor.rule, cursor.rates.decay, cursor.rates.retire, cursor.rest) == (
        "difficulty",
        DECAY,
        3,
        6 * REST_STEPS,
    )
    assert isinstance(build_cursor(prompts, config_of(retire=1)), SelectingCursor)
    assert isinstance(build_cursor(prompts, config_of()), PromptCursor)
    joined = JoinedPrompts([prompts[:20], prompts[20:]], ["a", "b"])
    mixed = build_cursor(joined, config_of(2.0, 1.0, sampling="thompson"))
    assert isinstance(mixed, MixedCursor)
    assert [(part.count, part.rest) for part in mixed.cursors if isinstance(part, SelectingCursor)] == [
        (20, 8),
        (40, 4),
    ]


def test_several_sets_keep_their_shares_and_each_its_own_rates() -> None:
    prompts = [Prompt(str(i), (), "s", "", "math", "") for i in range(60)]
    joined = JoinedPrompts([prompts[:30], prompts[30:]], ["a", "b"])
    config = config_of(2.0, 1.0, sampling="thompson", retire=2)
    continuous, resumed, draw_counts = build_cursor(joined, config), build_cursor(joined, config), Counter[bool]()
    for step in range(40):
        indices = continuous.take(9)
        assert resumed.take(9) == indices
        draw_counts.update(index < 30 for index in indices)
        for cursor in (continuous, resumed):
            judge(cursor, indices, step % 2)  # type: ignore[arg-type]
        resumed = build_cursor(joined, config).restored(json.loads(json.dumps(resumed.state())))
    assert draw_counts[True] == 2 * draw_counts[False]
    assert continuous.metrics() == resumed.metrics()
    assert 0.0 < continuous.metrics()["prompts/retired"] < continuous.metrics()["prompts/seen"] == 1.0


def groups_until_learned(rule: str, spread: float, seed: int) -> int:
    """Groups of eight that a policy needs until its mean pass rate is 0.8, with the filter of equal groups. Its pass
    rate at a prompt is σ(skill − hardness), hardness is spread evenly, and a step of eight kept groups raises the skill
    by their mean standard deviation, as GRPO's gradient grows."""
    rng, count, groups, skill = np.random.default_rng(seed), 384, 0, -1.0
    hardness = rng.uniform(-spread, spread, count)
    cursor = PromptCursor(count, seed, True) if rule == "uniform" else cursor_by(rule, count, rest=16)
    while (rates := 1.0 / (1.0 + np.exp(hardness - skill))).mean() < 0.8:
        deviations: list[float] = []
        while len(deviations) < 8:
            for index in cursor.take(8 - len(deviations)):
                right = int(rng.binomial(8, rates[index]))
                cursor.record_group(index, 1, right, 8)
                groups += 1
                deviations += [math.sqrt(right / 8 * (1 - right / 8))] if 0 < right < 8 else []
        skill += 0.12 * sum(deviations) / len(deviations)
    return groups


@pytest.mark.parametrize("rule", ["thompson", "difficulty"])
def test_mixed_prompts_need_fewer_groups_and_equal_ones_no_more(rule: str) -> None:
    def ratio(spread: float) -> float:
        return (
            sum(
                groups_until_learned(rule, spread, seed) / groups_until_learned("uniform", spread, seed)
                for seed in range(3)
            )
            / 3
        )

    assert ratio(8.0) < 0.75
    assert 0.9 < ratio(0.0) < 1.05
