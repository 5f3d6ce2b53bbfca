"""The choice of tokens for clip_cov and kl_cov: against plain loops, on one rank and on several."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.algorithms import losses
from rlcli.algorithms.ranks import ALONE, Ranks

relaxed = settings(deadline=None, max_examples=60)
NAMES = ["clip_cov", "kl_cov"]
Tokens = tuple[Tensor, Tensor, Tensor]


def tokens_of(seed: int, count: int, dtype: torch.dtype = torch.float64) -> Tokens:
    """Old log-probs, advantages and noise of `count` tokens."""
    generator = torch.Generator().manual_seed(seed)
    old, advantages, noise = torch.rand(3, count, dtype=torch.float64, generator=generator)
    return (-6 * old**2).to(dtype), (4 * advantages - 2).to(dtype), noise


def by_hand(name: str, tokens: Tokens, share: float, low: float, high: float) -> list[bool]:
    old, advantages, noise = (column.double().tolist() for column in tokens)
    n = len(old)
    mean_a, mean_l = math.fsum(advantages) / max(1, n), math.fsum(old) / max(1, n)
    cov = [(a - mean_a) * (log_prob - mean_l) for a, log_prob in zip(advantages, old, strict=True)]
    count = max(1, int(share * n))
    if name == "kl_cov":
        selected = sorted(range(n), key=lambda i: (-cov[i], noise[i]))[:count]
    else:
        selected = sorted((i for i in range(n) if low < cov[i] < high), key=lambda i: noise[i])[:count]
    return [i in selected for i in range(n)]


def select(name: str, tokens: Tokens, ranks: Ranks, share: float, low: float, high: float) -> Tensor:
    bounds = {"cov_low": low, "cov_high": high} if name == "clip_cov" else {}
    return losses.selectors.get(name)(*tokens, ranks, cov_share=share, **bounds)


def on_ranks(work: Callable[[int, Ranks], Tensor], count: int) -> list[Tensor]:
    """`work` of each of `count` ranks, in threads that wait for one another where they sum or gather."""
    slots: list[Tensor] = [torch.zeros(0)] * count
    barrier = Barrier(count, timeout=30)

    def together(rank: int, tensor: Tensor, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
        slots[rank] = tensor
        barrier.wait()
        joined = join(list(slots))
        barrier.wait()
        return joined

    def ranks_of(rank: int) -> Ranks:
        return Ranks(
            add=lambda tensor: together(rank, tensor, lambda all_of_them: torch.stack(all_of_them).sum(0)),
            gather=lambda tensor: together(rank, tensor, torch.cat),
        )

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: work(rank, ranks_of(rank)), range(count)))


def test_the_selectors_are_those_of_the_losses_that_ask_for_a_selection() -> None:
    assert losses.selectors.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 40),
    share=st.sampled_from([2e-4, 0.1, 0.5, 1.0]),
    bounds=st.sampled_from([(1.0, 5.0), (0.0, 1.0), (-1.0, 0.5)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_selection_equals_the_reference(
    name: str, seed: int, count: int, share: float, bounds: tuple[float, float], dtype: torch.dtype
) -> None:
    tokens = tokens_of(seed, count, dtype)
    got = select(name, tokens, ALONE, share, *bounds)
    assert got.dtype == torch.bool
    assert got.tolist() == by_hand(name, tokens, share, *bounds)


@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 30),
    ranks=st.integers(2, 3),
    share=st.sampled_from([2e-4, 0.2, 0.5]),
    low=st.sampled_from([0.0, 1.0, 100.0]),
)
def test_any_split_over_ranks_selects_the_same_tokens(
    name: str, seed: int, count: int, ranks: int, share: float, low: float
) -> None:
    tokens = tokens_of(seed, count)
    owner = torch.randint(ranks, (count,), generator=torch.Generator().manual_seed(seed))  # some ranks may have none
    owned = [(owner == rank).nonzero()[:, 0] for rank in range(ranks)]

    def work(rank: int, ranks_: Ranks) -> Tensor:
        old, advantages, noise = (column[owned[rank]] for column in tokens)
        return select(name, (old, advantages, noise), ranks_, share, low, 200.0)

    got = torch.zeros(count, dtype=torch.bool)
    for indexes, part in zip(owned, on_ranks(work, ranks), strict=True):
        got[indexes] = part
    assert got.tolist() == select(name, tokens, ALONE, share, low, 200.0).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_noise_decides_between_tokens_of_equal_covariance(name: str) -> None:
    old = torch.tensor([-3.0, -1.0, -3.0, -1.0, -1.0, -3.0])
    advantages = torch.tensor([-2.0, 2.0, -2.0, 2.0, 2.0, -2.0])  # a cov of 2 everywhere
    for noise in ([0.9, 0.3, 0.1, 0.5, 0.2, 0.8], [0.1, 0.9, 0.8, 0.2, 0.7, 0.6]):
        expected = [value in sorted(noise)[:3] for value in noise]
        assert select(name, (old, advantages, torch.tensor(noise)), ALONE, 0.5, 1.0, 5.0).tolist() == expected


@pytest.mark.parametrize(("bounds", "selected"), [((1.0, 5.0), 1), ((2.0, 5.0), 0), ((1.0, 2.0), 0)])
def test_covariance_bounds_are_exclusive_and_few_candidates_are_all_taken(
    bounds: tuple[float, float], selected: int
) -> None:
    old, advantages = torch.tensor([-3.0, -1.0, -3.0, -1.0]), torch.tensor([1.0, 3.0, 1.0, -1.0])  # cov 0, 2, 0, -2
    got = select("clip_cov", (old, advantages, torch.rand(4)), ALONE, 1.0, *bounds)
    assert got.tolist() == [False, selected == 1, False, False]
