"""Advantages of tokens against plain-Python loops written from the papers, on one rank and on several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.algorithms import advantages
from rlcli.algorithms.advantages import TokenAdvantages, whiten
from rlcli.algorithms.advantages.tokens import discounted_sums
from rlcli.algorithms.inputs import AdvantageInputs
from rlcli.algorithms.ranks import ALONE, Ranks

relaxed = settings(deadline=None, max_examples=60)
NAMES = ["reinforce_pp", "gae", "vapo", "prime"]
WITHOUT_CRITIC = {"reinforce_pp", "prime"}


class Token(NamedTuple):
    reward: float
    value: float
    process: float


class Response(NamedTuple):
    group: int
    reward: float
    tokens: Sequence[Token]


def float64(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def apply(
    name: str,
    responses: Sequence[Response],
    *,
    group_count: int,
    ranks: Ranks = ALONE,
    dtype: torch.dtype = torch.float64,
    **options: float,
) -> TokenAdvantages:
    """The advantage `name` with the inputs that it asks for, as a trainer gives them."""
    tokens = [token for response in responses for token in response.tokens]
    lengths = torch.tensor([len(response.tokens) for response in responses], dtype=torch.int64)
    inputs: dict[str, Any] = {
        "token_rewards": torch.tensor([token.reward for token in tokens], dtype=dtype),
        "values": torch.tensor([token.value for token in tokens], dtype=dtype),
        "process_rewards": torch.tensor([token.process for token in tokens], dtype=dtype),
        "rewards": torch.tensor([response.reward for response in responses], dtype=dtype),
        "sequence": torch.repeat_interleave(torch.arange(len(responses)), lengths),
        "lengths": lengths,
        "groups": torch.tensor([response.group for response in responses], dtype=torch.int64),
        "group_count": group_count,
        "ranks": ranks,
    }
    got = advantages.part(name, options)(AdvantageInputs(**inputs))
    assert isinstance(got, TokenAdvantages)
    return got


# --- references: (Â of every token before whitening, the critic's returns) --------------------------------------------


def to_go(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    result = [0.0] * len(rewards)
    following = 0.0
    for t in reversed(range(len(rewards))):
        following = rewards[t] + gamma * following
        result[t] = following
    return result


def gae_of(tokens: Sequence[Token], gamma: float, lam: float) -> list[float]:
    result = [0.0] * len(tokens)
    following = next_value = 0.0
    for t in reversed(range(len(tokens))):
        delta = tokens[t].reward + gamma * next_value - tokens[t].value
        following = delta + gamma * lam * following
        next_value = tokens[t].value
        result[t] = following
    return result


Reference = Callable[..., tuple[list[float], list[float]]]


def reinforce_pp(responses: Sequence[Response], gamma: float = 1.0) -> tuple[list[float], list[float]]:
    return [g for response in responses for g in to_go([token.reward for token in response.tokens], gamma)], []


def gae(responses: Sequence[Response], gamma: float = 1.0, lam: float = 1.0) -> tuple[list[float], list[float]]:
    raw = [a for response in responses for a in gae_of(response.tokens, gamma, lam)]
    values = [token.value for response in responses for token in response.tokens]
    return raw, [a + value for a, value in zip(raw, values, strict=True)]


def vapo(responses: Sequence[Response], alpha: float = 0.05) -> tuple[list[float], list[float]]:
    raw, returns = [], []
    for response in responses:
        if response.tokens:
            raw += gae_of(response.tokens, 1.0, max(0.0, 1 - 1 / (alpha * len(response.tokens))))
            critic = gae_of(response.tokens, 1.0, 1.0)
            returns += [a + token.value for a, token in zip(critic, response.tokens, strict=True)]
    return raw, returns


def prime(
    responses: Sequence[Response], process_coef: float = 5.0, accuracy_coef: float = 5.0
) -> tuple[list[float], list[float]]:
    def mean_process(response: Response) -> float:
        return math.fsum(token.process for token in response.tokens) / len(response.tokens)

    raw: list[float] = []
    for i, response in enumerate(responses):
        if not response.tokens:
            continue
        others = [other for j, other in enumerate(responses) if j != i and other.group == response.group]
        terms = [0.0] * len(response.tokens)
        written = [mean_process(other) for other in others if other.tokens]
        if written:
            # Scaling a token's reward by n / (n − 1), not only its response's mean, adds (r_t − r̄) / (n − 1).
            baseline, mean = math.fsum(written) / len(written), mean_process(response)
            for t, token in enumerate(response.tokens):
                terms[t] = process_coef * (token.process - baseline + (token.process - mean) / len(written))
        if others:
            baseline = math.fsum(other.reward for other in others) / len(others)
            terms[-1] += accuracy_coef * (response.reward - baseline)
        raw += to_go(terms)
    return raw, []


REFERENCES: dict[str, Reference] = {"reinforce_pp": reinforce_pp, "gae": gae, "vapo": vapo, "prime": prime}


def whitened(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / max(len(values), 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in values]


# --- steps ------------------------------------------------------------------------------------------------------------

number = st.one_of(st.sampled_from([0.0, 1.0, -0.5, 0.1]), st.floats(-3.0, 3.0))
tokens = st.lists(st.builds(Token, reward=number, value=number, process=number), max_size=9)
responses = st.lists(st.builds(Response, group=st.integers(0, 2), reward=number, tokens=tokens), max_size=7)
share = st.floats(0.0, 1.0)
OPTIONS = {
    "reinforce_pp": st.fixed_dictionaries({"gamma": share}),
    "gae": st.fixed_dictionaries({"gamma": share, "lam": share}),
    "vapo": st.fixed_dictionaries({"alpha": st.floats(0.01, 2.0)}),
    "prime": st.fixed_dictionaries({"process_coef": number, "accuracy_coef": number}),
}


@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(batch=responses, data=st.data())
def test_token_advantage_equals_the_reference(name: str, batch: list[Response], data: st.DataObject) -> None:
    options = data.draw(st.one_of(st.just({}), OPTIONS[name]))
    raw, returns = REFERENCES[name](batch, **options)
    got = apply(name, batch, group_count=3, **options)
    # Spreads near the √1e-8 of the divisor magnify rounding by ten thousand.
    torch.testing.assert_close(got.advantages, float64(whitened(raw)), rtol=1e-9, atol=1e-9)
    if name in WITHOUT_CRITIC:
        assert got.returns is None
    else:
        torch.testing.assert_close(got.returns, float64(returns), rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(batch=responses, data=st.data())
def test_permuting_the_responses_permutes_their_tokens(name: str, batch: list[Response], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(batch))))
    lengths = [len(response.tokens) for response in batch]
    plain, permuted = apply(name, batch, group_count=3), apply(name, [batch[i] for i in order], group_count=3)
    for original, reordered in zip(plain, permuted, strict=True):
        if original is not None:
            pieces = original.split(lengths)
            expected = torch.cat([*[pieces[i] for i in order], float64([])])
            torch.testing.assert_close(reordered, expected, rtol=1e-9, atol=1e-9)


# --- ranks ------------------------------------------------------------------------------------------------------------


def on_ranks(count: int, work: Callable[[int, Ranks], Any]) -> list[Any]:
    """`work(rank, ranks)` on every rank at once, each in a thread, as processes that meet in collectives."""
    barrier, posted = Barrier(count, timeout=30), [torch.empty(0)] * count

    def of(rank: int) -> Ranks:
        def meet(tensor: Tensor, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
            posted[rank] = tensor
            barrier.wait()
            joined = join(posted)
            barrier.wait()
            return joined

        return Ranks(
            add=lambda tensor: meet(tensor, lambda all_of: torch.stack(all_of).sum(0)),
            gather=lambda tensor: meet(tensor, torch.cat),
        )

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: work(rank, of(rank)), range(count)))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(batch=responses, data=st.data())
def test_any_split_over_ranks_gives_the_same(name: str, batch: list[Response], data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 3))
    where = data.draw(st.lists(st.integers(0, count - 1), min_size=len(batch), max_size=len(batch)))
    owned = [[i for i, rank in enumerate(where) if rank == mine] for mine in range(count)]

    def work(rank: int, ranks: Ranks) -> TokenAdvantages:
        return apply(name, [batch[i] for i in owned[rank]], group_count=3, ranks=ranks)

    lengths = [len(response.tokens) for response in batch]
    unsplit = apply(name, batch, group_count=3)
    for mine, part in zip(owned, on_ranks(count, work), strict=True):
        for together, alone in zip(unsplit, part, strict=True):
            if together is not None:
                pieces = together.split(lengths)
                expected = torch.cat([*[pieces[i] for i in mine], float64([])])
                torch.testing.assert_close(alone, expected, rtol=1e-10, atol=1e-9)


def test_whitening_over_ranks_equals_whitening_on_one_to_the_last_digits() -> None:
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 100
    weights = torch.arange(1000) % 7
    parts = [slice(0, 0), slice(0, 300), slice(300, 1000)]
    got = on_ranks(3, lambda rank, ranks: whiten(values[parts[rank]], weights[parts[rank]], ranks))
    torch.testing.assert_close(torch.cat(got), whiten(values, weights), rtol=1e-12, atol=1e-12)


def test_equal_values_on_several_ranks_are_whitened_to_exactly_zero() -> None:
    got = on_ranks(3, lambda rank, ranks: whiten(torch.full((rank,), 0.1), ranks=ranks))
    assert torch.cat(got).tolist() == [0.0, 0.0, 0.0]


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_advantages_keep_the_dtype(name: str, dtype: torch.dtype) -> None:
    responses = [Response(0, 1.0, [Token(1.0, 0.5, 0.25)] * 3), Response(0, 0.0, [Token(0.0, 0.5, -0.25)] * 2)]
    got = apply(name, responses, group_count=1, dtype=dtype)
    assert got.advantages.dtype == dtype
    assert got.returns is None or got.returns.dtype == dtype


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 3])
def test_a_step_without_tokens_has_no_advantages(name: str, count: int) -> None:
    got = apply(name, [Response(0, 1.0, [])] * count, group_count=1)
    assert got.advantages.shape == (0,)
    assert got.returns is None or got.returns.shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_a_single_token_has_an_advantage_of_exactly_zero(name: str) -> None:
    assert apply(name, [Response(0, 1.0, [Token(1.0, 0.3, 0.2)])], group_count=1).advantages.tolist() == [0.0]


def test_prime_gives_exactly_zero_to_responses_without_a_comparison() -> None:
    responses = [Response(group, 1.0, [Token(0.0, 0.0, 0.1 * group)] * 3) for group in range(3)]
    assert apply("prime", responses, group_count=3).advantages.tolist() == [0.0] * 9


def test_a_critic_that_knows_the_returns_leaves_gae_nothing() -> None:
    responses = [
        Response(0, 0.0, [Token(reward, value, 0.0) for reward, value in [(0.5, 2.0), (0.5, 1.5), (1.0, 1.0)]])
    ]
    got = apply("gae", responses, group_count=1, lam=0.9)
    assert got.advantages.tolist() == [0.0] * 3
    assert got.returns is not None
    assert got.returns.tolist() == [2.0, 1.5, 1.0]


# --- the scan ---------------------------------------------------------------------------------------------------------


@relaxed
@given(
    rows=st.lists(st.tuples(st.lists(st.floats(-9.0, 9.0), max_size=20), st.floats(0.0, 1.0)), max_size=5),
)
def test_sums_with_a_decay_for_each_sequence_equal_the_loop(rows: list[tuple[list[float], float]]) -> None:
    expected = [value for row, decay in rows for value in to_go(row, decay)]
    sequence = torch.tensor([i for i, (row, _) in enumerate(rows) for _ in row], dtype=torch.int64)
    values = float64([value for row, _ in rows for value in row])
    decays = float64([decay for row, decay in rows for _ in row])
    torch.testing.assert_close(discounted_sums(values, sequence, decays), float64(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 4095, 4096, 4097])
def test_sums_of_a_long_sequence_reach_from_its_first_token_to_its_last(length: int) -> None:
    values = torch.rand(length + 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sequence = torch.tensor([0] * length + [1] * 5)
    expected = float64(to_go(values[:length].tolist(), 0.999) + to_go(values[length:].tolist(), 0.999))
    torch.testing.assert_close(discounted_sums(values, sequence, 0.999), expected, rtol=1e-12, atol=0.0)
