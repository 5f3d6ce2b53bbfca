"""Noise by counter: it draws from the distribution that the logits say, and depends on seed and position alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlcli.rollout.sampling import draw_keys, gumbel_argmax, install, uses_whole_keys

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 0.5, -3.0, 1.5])
DRAWS = 40_000

Numbers = np.ndarray | int


def keys(seeds: Numbers, positions: Numbers) -> torch.Tensor:
    pair = np.broadcast_arrays(np.asarray(seeds, np.int64), np.asarray(positions, np.int64))
    return torch.from_numpy(draw_keys(*pair))


def drawn(seeds: Numbers, positions: Numbers) -> torch.Tensor:
    given = keys(seeds, positions)
    return gumbel_argmax(LOGITS.expand(len(given), -1), given)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """In standard deviations from its mean, which are √(2 · degrees of freedom)."""
    degrees = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / (2 * degrees) ** 0.5)


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [
        (np.arange(DRAWS), 7),
        (np.arange(DRAWS) << 40, 7),
        (123, np.arange(DRAWS)),
        (np.arange(DRAWS), np.arange(DRAWS)[::-1]),
    ],
)
def test_draws_follow_the_distribution(seeds: Numbers, positions: Numbers) -> None:
    counts = drawn(seeds, positions).bincount(minlength=8).double()
    assert chi_square(counts, LOGITS.double().softmax(0) * DRAWS) < 5


def test_draws_of_neighbouring_positions_and_seeds_are_independent() -> None:
    p = LOGITS.double().softmax(0)
    joint = (p[:, None] * p).flatten() * DRAWS
    one = drawn(np.arange(DRAWS), 7)
    for other in (drawn(np.arange(DRAWS), 8), drawn(np.arange(DRAWS) + 1, 7), drawn(np.arange(DRAWS) + 1, 6)):
        assert chi_square((one * 8 + other).bincount(minlength=64).double(), joint) < 5


def test_noise_of_different_tokens_is_independent() -> None:
    flat = torch.zeros(DRAWS, 64)
    counts = gumbel_argmax(flat, keys(np.arange(DRAWS), 3)).bincount(minlength=64).double()
    assert chi_square(counts, torch.full((64,), DRAWS / 64, dtype=torch.float64)) < 5


def test_a_row_draws_the_same_wherever_it_stands_in_the_batch() -> None:
    given = keys(np.arange(64), np.arange(64) % 5)
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    whole = gumbel_argmax(logits, given)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert gumbel_argmax(logits[order], given[order]).equal(whole[order])
    assert gumbel_argmax(logits[9:10], given[9:10]).equal(whole[9:10])


def test_what_is_filtered_is_never_drawn_even_where_one_token_is_left() -> None:
    logits = torch.full((DRAWS, 8), -torch.inf)
    logits[:, 5] = -20.0
    assert gumbel_argmax(logits, keys(np.arange(DRAWS), 0)).eq(5).all()


def test_rare_tokens_are_drawn_as_often_as_they_should_be() -> None:
    logits = torch.zeros(2000, 2000)
    logits[:, :10] = 9.0  # what is left holds 2.4% of the probability
    rare = gumbel_argmax(logits, keys(np.arange(2000), 11)) >= 10
    expected = 1990 / (1990 + 10 * float(np.exp(9.0)))
    assert abs(float(rare.double().mean()) - expected) < 5 * (expected / 2000) ** 0.5


def test_a_vllm_without_the_seam_is_left_alone() -> None:
    assert not install(SimpleNamespace())
    assert not install(SimpleNamespace(model_runner=SimpleNamespace(sampler=SimpleNamespace())))


def test_a_short_table_kernel_is_distinguished_from_a_full_hash() -> None:
    noise = -torch.rand(1 << 20, generator=torch.Generator().manual_seed(42)).log().neg().log()

    def table(logits: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        places = given[:, None] + torch.arange(logits.shape[1])
        return (logits + noise[places & ((1 << 20) - 1)]).argmax(-1)

    def half(logits: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return gumbel_argmax(logits, given & 0xFFFFFFFF)

    assert uses_whole_keys(gumbel_argmax)
    assert not uses_whole_keys(table)
    assert not uses_whole_keys(half)
