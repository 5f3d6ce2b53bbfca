"""Advantages of turns against plain-Python loops written from the papers, and their expectation by enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.algorithms import advantages
from rlcli.algorithms.build import build_algorithm
from rlcli.algorithms.inputs import AdvantageInputs
from rlcli.errors import ConfigError

relaxed = settings(deadline=None, max_examples=40)


class Turn(NamedTuple):
    state: int
    reward: float


class Conversation(NamedTuple):
    group: int
    turns: Sequence[Turn]


def apply(name: str, conversations: Sequence[Conversation], width: int = 0, **options: Any) -> list[list[float]]:
    """The advantage of each turn. width: of the columns, at least the most turns."""
    width = max([width, 1, *(len(conversation.turns) for conversation in conversations)])

    def column(values: list[list[Any]], dtype: torch.dtype) -> Tensor:
        padded = [row + [0] * (width - len(row)) for row in values]
        return torch.tensor(padded, dtype=dtype).reshape(-1, width)

    inputs = {
        "turn_rewards": column(
            [[turn.reward for turn in conversation.turns] for conversation in conversations], torch.float64
        ),
        "turn_states": column(
            [[turn.state for turn in conversation.turns] for conversation in conversations], torch.int64
        ),
        "turns": torch.tensor([len(conversation.turns) for conversation in conversations], dtype=torch.int64),
        "groups": torch.tensor([conversation.group for conversation in conversations], dtype=torch.int64),
    }
    got = advantages.part(name, options)(AdvantageInputs(**inputs))
    assert isinstance(got, Tensor)
    assert got.dtype == torch.float64
    for row, conversation in zip(got, conversations, strict=True):
        assert not row[len(conversation.turns) :].any(), "behind the last turn nothing is learned"
    return [row[: len(conversation.turns)].tolist() for row, conversation in zip(got, conversations, strict=True)]


# --- references -------------------------------------------------------------------------------------------------------


def to_go(conversation: Conversation, gamma: float = 1.0) -> list[float]:
    return [
        math.fsum(gamma ** (k - t) * conversation.turns[k].reward for k in range(t, len(conversation.turns)))
        for t in range(len(conversation.turns))
    ]


def turn_rloo(conversations: Sequence[Conversation]) -> list[list[float]]:
    result = []
    for i, conversation in enumerate(conversations):
        others = [to_go(other) for j, other in enumerate(conversations) if j != i and other.group == conversation.group]
        row = []
        for t, own_return in enumerate(to_go(conversation)):
            theirs = [other[t] if t < len(other) else 0.0 for other in others]
            row.append(own_return - math.fsum(theirs) / len(theirs) if theirs else 0.0)
        result.append(row)
    return result


def compared(value: float, among: Sequence[float], scale: str) -> float:
    if len(set(among)) == 1:
        return 0.0
    mean = math.fsum(among) / len(among)
    spread = math.sqrt(math.fsum((other - mean) ** 2 for other in among) / (len(among) - 1))
    return (value - mean) / (spread + 1e-6 if scale == "group" else 1.0)


def gigpo(
    conversations: Sequence[Conversation], gamma: float = 1.0, omega: float = 1.0, scale: str = "group"
) -> list[list[float]]:
    result = []
    for conversation in conversations:
        group = [other for other in conversations if other.group == conversation.group]
        episode = (
            compared(to_go(conversation)[0], [to_go(other)[0] for other in group], scale) if conversation.turns else 0.0
        )
        row = []
        for turn, own_return in zip(conversation.turns, to_go(conversation, gamma), strict=True):
            anchored = [
                theirs
                for other in group
                for step, theirs in zip(other.turns, to_go(other, gamma), strict=True)
                if step.state == turn.state
            ]
            row.append(episode + omega * compared(own_return, anchored, scale))
        result.append(row)
    return result


def close(got: list[list[float]], expected: list[list[float]], tolerance: float = 1e-9) -> bool:
    return all(a == pytest.approx(b, rel=1e-9, abs=tolerance) for a, b in zip(got, expected, strict=True))


# Sums of eighths do not round, so that equal returns are equal in the reference, too.
reward = st.sampled_from([0.0, 0.0, 1.0, 0.5, -1.0, 0.125])
turn = st.builds(Turn, state=st.integers(0, 3), reward=reward)
conversations = st.lists(
    st.builds(Conversation, group=st.sampled_from([-(2**40), 3, 7]), turns=st.lists(turn, min_size=1, max_size=5)),
    max_size=8,
)
halves = st.sampled_from([0.0, 0.5, 1.0])


@relaxed
@given(batch=conversations, width=st.integers(0, 8))
def test_turn_rloo_equals_the_loop_over_the_others(batch: list[Conversation], width: int) -> None:
    assert close(apply("turn_rloo", batch, width), turn_rloo(batch))


@relaxed
@given(
    batch=conversations, width=st.integers(0, 8), gamma=halves, omega=halves, scale=st.sampled_from(["group", "none"])
)
def test_gigpo_equals_the_loop_over_anchors(
    batch: list[Conversation], width: int, gamma: float, omega: float, scale: str
) -> None:
    got = apply("gigpo", batch, width, gamma=gamma, scale=scale, omega=omega)
    assert close(got, gigpo(batch, gamma, omega, scale), 1e-8)


@pytest.mark.parametrize("name", ["turn_rloo", "gigpo"])
@relaxed
@given(batch=conversations, data=st.data())
def test_permuting_the_conversations_permutes_their_advantages(
    name: str, batch: list[Conversation], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(batch))))
    plain = apply(name, batch)
    assert close(apply(name, [batch[i] for i in order]), [plain[i] for i in order])


@relaxed
@given(grouped_rewards=st.lists(st.tuples(st.integers(0, 2), st.floats(-9.0, 9.0)), max_size=8))
def test_with_a_single_turn_they_are_rloo_and_grpo_to_the_bit(grouped_rewards: list[tuple[int, float]]) -> None:
    single = [Conversation(group, [Turn(0, reward)]) for group, reward in grouped_rewards]
    rewards = torch.tensor([reward for _, reward in grouped_rewards], dtype=torch.float64)
    groups = torch.tensor([group for group, _ in grouped_rewards], dtype=torch.int64)
    inputs = AdvantageInputs(rewards=rewards, groups=groups)
    assert apply("turn_rloo", single) == advantages.groups.rloo(inputs)[:, None].tolist()
    grpo = advantages.groups.grpo(inputs)[:, None]
    assert apply("gigpo", single) == (2 * grpo).tolist()
    assert apply("gigpo", single, omega=0.0) == grpo.tolist()


@pytest.mark.parametrize("name", ["turn_rloo", "gigpo"])
def test_a_group_without_differences_has_advantages_of_exactly_zero(name: str) -> None:
    equal = [Conversation(7, [Turn(1, 0.1), Turn(2, 0.2), Turn(2, 0.7)])] * 5
    alone = [Conversation(9, [Turn(1, 0.3), Turn(3, 1.0)])]
    others = [Conversation(8, [Turn(1, 1 / 3)]), Conversation(8, [Turn(1, 0.2), Turn(2, 0.4)])]
    got = apply(name, [others[0], *equal, *alone, others[1]])
    assert any(got[0])
    if name == "turn_rloo":
        assert got[1:7] == [[0.0] * 3] * 5 + [[0.0] * 2]
    else:  # within a conversation, the second and third turn are in the same state and have different returns
        assert [row[0] for row in got[1:7]] == [0.0] * 6
        assert got[6] == [0.0, 0.0]
        assert all(row[1] == -row[2] != 0.0 for row in got[1:6])


@pytest.mark.parametrize("name", ["turn_rloo", "gigpo"])
def test_a_step_without_conversations_has_no_advantages(name: str) -> None:
    assert apply(name, []) == []


def test_a_turn_that_nobody_else_reached_is_compared_with_nothing_earned() -> None:
    conversations = [
        Conversation(0, [Turn(0, 0.0), Turn(1, 1.0)]),
        Conversation(0, [Turn(0, 0.5)]),
        Conversation(0, [Turn(0, 0.0)]),
    ]
    assert apply("turn_rloo", conversations) == [[0.75, 1.0], [0.0], [-0.75]]


def test_gigpo_refuses_an_unknown_scale() -> None:
    with pytest.raises(ConfigError, match="there is no scale 'batch'; choose one of: group, none"):
        build_algorithm(advantage="gigpo", scale="batch")


def test_turn_levels_fit_neither_a_penalty_in_the_reward_nor_pairs() -> None:
    with pytest.raises(ConfigError, match=r"turn_rloo does not use the reward that algorithm.kl_in = reward changes"):
        build_algorithm(advantage="turn_rloo", kl_in="reward", kl_coef=0.1)
    with pytest.raises(ConfigError, match=r"which algorithm.advantage = turn_rloo does not provide"):
        build_algorithm(advantage="turn_rloo", loss="dpo", select="pairs", options={"beta": 0.1})


# --- the expectation, by enumeration ----------------------------------------------------------------------------------

STAY = 0.3, -0.4
"""Logits of the first turn: the second action ends the conversation, the first one goes on to the second turn."""
THEN = -0.2, 0.5
"""Logits of the second turn."""
FIRST, SECOND = (0.75, 0.25), (2.0, -0.5)
"""Rewards of the actions. A reward in between is earned by those who go on: a baseline must not charge them for it."""
Step = tuple[int, int]
Path = tuple[Step, ...]


def paths() -> Iterator[Path]:
    """Every conversation: the turns' numbers and actions."""
    yield ((0, 1),)
    for then in (0, 1):
        yield ((0, 0), (1, then))


def log_probs(theta: Tensor) -> Tensor:
    return torch.log_softmax(theta.view(2, 2), dim=1)


def chance_of(logs: Tensor, path: Path) -> Tensor:
    return torch.stack([logs[step] for step in path]).sum().exp()


def rewards_of(path: Path) -> list[float]:
    return [(FIRST, SECOND)[turn][action] for turn, action in path]


def gradient_of_value(theta: Tensor) -> Tensor:
    def value() -> Tensor:
        logs = log_probs(theta)
        return torch.stack([chance_of(logs, path) * sum(rewards_of(path)) for path in paths()]).sum()

    (gradient,) = torch.autograd.grad(value(), theta)
    return gradient


def expected(theta: Tensor, size: int, estimate: Callable[[Sequence[Path]], list[list[float]]]) -> Tensor:
    """The mean over all groups of `size` conversations of (1/n) Σ_i Σ_t A_it ∇ log π."""
    total = torch.zeros_like(theta)
    for group in product(paths(), repeat=size):
        logs = log_probs(theta)
        chance = chance_of(logs, tuple(step for path in group for step in path)).item()
        estimates = estimate(group)
        terms = [
            a * logs[step]
            for path, row in zip(group, estimates, strict=True)
            for a, step in zip(row, path, strict=True)
        ]
        (gradient,) = torch.autograd.grad(torch.stack(terms).sum() / size, theta)
        total += chance * gradient
    return total


def by_function(group: Sequence[Path]) -> list[list[float]]:
    return apply("turn_rloo", [Conversation(0, [Turn(0, r) for r in rewards_of(path)]) for path in group])


def by_turn_then_summed(group: Sequence[Path]) -> list[list[float]]:
    """The trap: each turn's reward less the mean of that turn's, added up over the turns that were taken."""
    rewards = [rewards_of(path) for path in group]
    result = []
    for i, own_rewards in enumerate(rewards):
        less = []
        for t, reward in enumerate(own_rewards):
            others = [other[t] for j, other in enumerate(rewards) if j != i and len(other) > t]
            less.append(reward - (sum(others) / len(others) if others else 0.0))
        result.append([sum(less[t:]) for t in range(len(own_rewards))])
    return result


@pytest.mark.parametrize("size", [2, 3])
def test_turn_rloo_is_unbiased_where_conversations_differ_in_length(size: int) -> None:
    theta = torch.tensor([*STAY, *THEN], dtype=torch.float64, requires_grad=True)
    exact = gradient_of_value(theta)
    torch.testing.assert_close(expected(theta, size, by_function), exact, rtol=1e-12, atol=1e-12)
    assert (expected(theta, size, by_turn_then_summed) - exact).abs().max() > 0.01, "the test tells a bias"
