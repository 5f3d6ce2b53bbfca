"""Advantages of whole responses against plain-Python references written from the papers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.algorithms import advantages
from rlcli.algorithms.advantages import whiten
from rlcli.algorithms.inputs import AdvantageInputs
from rlcli.errors import ConfigError, UnknownName

relaxed = settings(deadline=None, max_examples=60)  # the first call of a torch operation is slow


class Response(NamedTuple):
    group: int
    reward: float
    length: int
    baseline: float
    parts: tuple[float, float]


Group = Sequence[Response]


def float64(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def apply(name: str, responses: Sequence[Response], dtype: torch.dtype = torch.float64, **options: object) -> Tensor:
    """The advantage `name` with the inputs that it asks for, as a trainer gives them."""
    inputs: dict[str, Any] = {
        "rewards": torch.tensor([response.reward for response in responses], dtype=dtype),
        "groups": torch.tensor([response.group for response in responses], dtype=torch.int64),
        "lengths": torch.tensor([response.length for response in responses], dtype=torch.int64),
        "baselines": torch.tensor([response.baseline for response in responses], dtype=dtype),
        "parts": torch.tensor([response.parts for response in responses], dtype=dtype).reshape(-1, 2),
    }
    if "part_weights" in options:
        inputs["part_weights"] = options.pop("part_weights")
    got = advantages.part(name, options)(AdvantageInputs(**inputs))
    assert isinstance(got, Tensor)
    return got


# --- references: of one group, in exact rationals so that they do not round -------------------------------------------


def exact_rewards(group: Group) -> list[Fraction]:
    return [Fraction(response.reward) for response in group]


def normalised(values: list[Fraction]) -> list[float]:
    if len(set(values)) == 1:
        return [0.0] * len(values)
    mean, spread = statistics.mean(values), math.sqrt(statistics.variance(values))
    return [float(value - mean) / (spread + 1e-6) for value in values]


def grpo(group: Group) -> list[float]:
    return normalised(exact_rewards(group))


def dr_grpo(group: Group) -> list[float]:
    rewards = exact_rewards(group)
    return [float(reward - statistics.mean(rewards)) for reward in rewards]


def rloo(group: Group) -> list[float]:
    rewards = exact_rewards(group)
    if len(rewards) == 1:
        return [0.0]
    return [float(reward - (sum(rewards) - reward) / (len(rewards) - 1)) for reward in rewards]


def grpo_passk(group: Group) -> list[float]:
    rewards = exact_rewards(group)
    result = [0.0] * len(rewards)
    if len(rewards) > 1:
        second, first = sorted(rewards)[-2:]
        if first > second:
            gap = float(first - second) / (math.sqrt(statistics.variance(rewards)) + 1e-6)
            result[rewards.index(first)] = gap
    return result


def maxrl(group: Group) -> list[float]:
    rewards = exact_rewards(group)
    mean = statistics.mean(rewards)
    if mean <= 0:
        return [0.0] * len(rewards)
    return [float(reward - mean) / (float(mean) + 1e-6) for reward in rewards]


def opo(group: Group) -> list[float]:
    rewards = exact_rewards(group)
    tokens = sum(response.length for response in group)
    # Where no response has a token no advantage is used; ours is measured from the lowest reward.
    baseline = min(rewards)
    if tokens:
        weighed = (response.length * reward for response, reward in zip(group, rewards, strict=True))
        baseline = sum(weighed, Fraction()) / tokens
    return [float(reward - baseline) for reward in rewards]


def win_rate(group: Group) -> list[float]:
    result = []
    for i, response in enumerate(group):
        others = [other.reward for j, other in enumerate(group) if j != i]
        points = [1.0 if response.reward > other else 0.5 if response.reward == other else 0.0 for other in others]
        result.append(sum(points) / len(points) - 0.5 if points else 0.0)
    return result


def remax(group: Group) -> list[float]:
    return [response.reward - response.baseline for response in group]


def one(group: Group) -> list[float]:
    return [1.0] * len(group)


# --- references: of the whole step ------------------------------------------------------------------------------------


def per_group(reference: Callable[[Group], list[float]]) -> Callable[[Sequence[Response]], list[float]]:
    def of_step(responses: Sequence[Response]) -> list[float]:
        members: dict[int, list[Response]] = {}
        for response in responses:
            members.setdefault(response.group, []).append(response)
        done = {label: iter(reference(group)) for label, group in members.items()}
        return [next(done[response.group]) for response in responses]

    return of_step


def gpg(responses: Sequence[Response]) -> list[float]:
    seen: dict[int, set[float]] = {}
    for response in responses:
        seen.setdefault(response.group, set()).add(response.reward)
    with_gradient = sum(len(seen[response.group]) > 1 for response in responses)
    scale = len(responses) / with_gradient if with_gradient else 0.0
    return [scale * advantage for advantage in per_group(dr_grpo)(responses)]


def whitened(values: Sequence[float], times: Sequence[int]) -> list[float]:
    tokens = [value for value, count in zip(values, times, strict=True) for _ in range(count)]
    mean = math.fsum(tokens) / len(tokens) if tokens else 0.0
    variance = math.fsum((token - mean) ** 2 for token in tokens) / max(len(tokens) - 1, 1)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in values]


def reinforce_pp_baseline(responses: Sequence[Response]) -> list[float]:
    return whitened(per_group(dr_grpo)(responses), [response.length for response in responses])


def gdpo(responses: Sequence[Response], weights: tuple[float, float] = (1.0, 1.0)) -> list[float]:
    parts = [per_group(lambda group, k=k: normalised([Fraction(r.parts[k]) for r in group]))(responses) for k in (0, 1)]
    total = [weights[0] * first + weights[1] * second for first, second in zip(*parts, strict=True)]
    return whitened(total, [1] * len(total))


REFERENCES: dict[str, Callable[[Sequence[Response]], list[float]]] = {
    "grpo": per_group(grpo),
    "dr_grpo": per_group(dr_grpo),
    "rloo": per_group(rloo),
    "grpo_passk": per_group(grpo_passk),
    "gpg": gpg,
    "maxrl": per_group(maxrl),
    "opo": per_group(opo),
    "win_rate": per_group(win_rate),
    "remax": per_group(remax),
    "one": per_group(one),
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gdpo": gdpo,
}
NOT_ZERO_FOR_EQUAL_REWARDS = {"one", "remax"}
# Spreads near the 1e-6 or the √1e-8 that divisors are given magnify rounding by up to a million.
TOLERANCE = dict.fromkeys(["grpo", "grpo_passk", "gdpo", "reinforce_pp_baseline"], 1e-8)

any_reward = st.one_of(st.sampled_from([0.0, 1.0, 0.1, -0.5]), st.floats(-10.0, 10.0))
# Sums of eighths do not round, so that a mean of 0 is one.
eighths = st.integers(-80, 80).map(lambda n: n / 8)
REWARDS = {"maxrl": st.one_of(eighths, st.sampled_from([0.0, 1.0]))}


@st.composite
def steps(draw: st.DrawFn, rewards: st.SearchStrategy[float] = any_reward) -> list[Response]:
    """The responses of a step, groups interleaved, labels neither sorted nor dense, some responses empty."""
    labels = draw(st.lists(st.integers(-(2**40), 2**40), unique=True, min_size=1, max_size=4))
    responses = []
    for label in labels:
        constant = draw(st.booleans())
        reward = draw(rewards)
        for _ in range(draw(st.integers(1, 5))):
            parts = (reward, 0.3) if constant else (draw(rewards), draw(st.sampled_from([0.0, 1.0])))
            responses.append(Response(label, parts[0], draw(st.integers(0, 5)), draw(eighths), parts))
    return draw(st.permutations(responses))


@pytest.mark.parametrize("name", REFERENCES)
@relaxed
@given(data=st.data())
def test_advantage_equals_the_reference_for_groups_in_any_order(name: str, data: st.DataObject) -> None:
    responses = data.draw(steps(REWARDS.get(name, any_reward)))
    expected = float64(REFERENCES[name](responses))
    torch.testing.assert_close(apply(name, responses), expected, rtol=1e-9, atol=TOLERANCE.get(name, 1e-12))


@pytest.mark.parametrize("name", sorted(set(REFERENCES) - NOT_ZERO_FOR_EQUAL_REWARDS))
@relaxed
@given(
    groups=st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(1, 6)), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_groups_of_equal_rewards_have_advantages_of_exactly_zero(
    name: str, groups: list[tuple[float, int]], dtype: torch.dtype
) -> None:
    responses = [
        Response(label, reward, 3 + i, 0.0, (reward, 0.1))
        for label, (reward, size) in enumerate(groups)
        for i in range(size)
    ]
    got = apply(name, responses, dtype)
    assert got.dtype == dtype
    assert got.tolist() == [0.0] * len(responses)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[(name, {}) for name in sorted(set(REFERENCES) - NOT_ZERO_FOR_EQUAL_REWARDS - {"reinforce_pp_baseline"})],
        ("grpo", {"scale": "batch"}),
        ("grpo", {"scale": "none"}),
    ],
)
def test_a_group_of_equal_rewards_stays_at_exactly_zero_beside_others(name: str, options: dict[str, str]) -> None:
    equal = [Response(7, 0.1, 2, 0.0, (0.1, 0.7)) for _ in range(6)]
    others = [Response(9, 1 / 3, 1, 0.0, (1 / 3, 0.0)), Response(9, 0.9, 5, 0.0, (0.9, 0.2))]
    got = apply(name, [others[0], *equal, others[1]], **options).tolist()
    assert got[1:-1] == [0.0] * 6
    assert any(got)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_step_without_responses_has_no_advantages(name: str) -> None:
    got = apply(name, [], torch.float32)
    assert got.shape == (0,)
    assert got.dtype == torch.float32


@pytest.mark.parametrize("name", REFERENCES)
@relaxed
@given(responses=steps(eighths), data=st.data())
def test_permuting_the_responses_permutes_their_advantages(
    name: str, responses: list[Response], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(responses))))
    permuted = apply(name, [responses[i] for i in order])
    torch.testing.assert_close(permuted, apply(name, responses)[order], rtol=1e-9, atol=1e-9)


@relaxed
@given(responses=steps())
def test_grpo_divides_by_the_spread_of_the_batch_where_asked(responses: list[Response]) -> None:
    rewards = exact_rewards(responses)
    spread = math.sqrt(statistics.variance(rewards)) if len(rewards) > 1 else 0.0
    expected = float64([value / (spread + 1e-6) for value in per_group(dr_grpo)(responses)])
    torch.testing.assert_close(apply("grpo", responses, scale="batch"), expected, rtol=1e-9, atol=1e-8)


@relaxed
@given(responses=steps())
def test_grpo_without_scale_is_dr_grpo(responses: list[Response]) -> None:
    assert apply("grpo", responses, scale="none").tolist() == apply("dr_grpo", responses).tolist()


def test_grpo_refuses_an_unknown_scale() -> None:
    with pytest.raises(ConfigError, match="'groups'; choose one of: batch, group, none"):
        apply("grpo", [Response(0, 1.0, 1, 0.0, (1.0, 1.0))], scale="groups")


@relaxed
@given(responses=steps(), weights=st.tuples(eighths, eighths))
def test_gdpo_weighs_its_parts(responses: list[Response], weights: tuple[float, float]) -> None:
    expected = float64(gdpo(responses, weights))
    torch.testing.assert_close(apply("gdpo", responses, part_weights=weights), expected, rtol=1e-8, atol=1e-7)


def test_gdpo_refuses_another_number_of_weights() -> None:
    with pytest.raises(ConfigError, match="3 weights for the 2 parts"):
        apply("gdpo", [Response(0, 1.0, 1, 0.0, (1.0, 1.0))], part_weights=[1.0, 1.0, 1.0])


def test_maxrl_of_binary_rewards_is_between_minus_one_and_group_size() -> None:
    got = apply("maxrl", [Response(0, float(i == 3), 1, 0.0, (0.0, 0.0)) for i in range(8)])
    torch.testing.assert_close(got, float64([7.0 if i == 3 else -1.0 for i in range(8)]), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("name", sorted(set(REFERENCES) - {"remax", "one"}))
def test_rewards_that_all_but_agree_stay_finite(name: str) -> None:
    nearly = [1.0, math.nextafter(1.0, 2.0), 1.0]
    got = apply(name, [Response(0, reward, 0, 0.0, (reward, -reward)) for reward in nearly])
    assert torch.isfinite(got).all()


# --- whitening --------------------------------------------------------------------------------------------------------


@relaxed
@given(weighed=st.lists(st.tuples(any_reward, st.integers(0, 5)), max_size=8))
def test_whitening_with_weights_equals_whitening_the_repeated_values(weighed: list[tuple[float, int]]) -> None:
    values, times = [value for value, _ in weighed], [count for _, count in weighed]
    got = whiten(float64(values), torch.tensor(times, dtype=torch.int64))
    if any(times):
        torch.testing.assert_close(got, float64(whitened(values, times)), rtol=1e-9, atol=1e-8)
    assert torch.isfinite(got).all()


def test_whitening_keeps_its_digits_beside_a_large_offset() -> None:
    got = whiten(float64([1e9, 1e9 + 1, 1e9 + 2]))
    torch.testing.assert_close(got, float64([-1.0, 0.0, 1.0]), rtol=1e-7, atol=1e-12)


@relaxed
@given(value=st.floats(-1e6, 1e6), times=st.lists(st.integers(1, 9), max_size=9), other=st.floats(-1e6, 1e6))
def test_equal_values_are_whitened_to_exactly_zero_whatever_is_masked(
    value: float, times: list[int], other: float
) -> None:
    got = whiten(float64([other, *[value] * len(times)]), torch.tensor([0, *times]))
    assert got.tolist()[1:] == [0.0] * len(times)
    assert whiten(float64([value] * len(times))).tolist() == [0.0] * len(times)


# --- names ------------------------------------------------------------------------------------------------------------


def test_every_advantage_has_a_reference() -> None:
    token_level, turn_level = {"reinforce_pp", "gae", "vapo", "prime", "opd"}, {"turn_rloo", "gigpo"}
    built_in = {name for name in advantages.names() if advantages.get(name).__module__.startswith("rlcli.")}
    assert built_in == set(REFERENCES) | token_level | turn_level
    assert {name for name in built_in if advantages.rules(name).level == "token"} == token_level
    assert {name for name in built_in if advantages.rules(name).level == "turn"} == turn_level


def test_an_unknown_name_is_refused_with_the_near_ones() -> None:
    with pytest.raises(UnknownName, match=r"'grpoo'.*grpo"):
        advantages.get("grpoo")
