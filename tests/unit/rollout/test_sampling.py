"""Noise by counter: it draws from the distribution that the logits say, and depends on seed and position alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlcli.rollout.sampling import SPAN, draw_keys, gumbel_argmax, install, inverse_cdf

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 0.5, -3.0, 1.5])
DRAWS = 40_000

Numbers = np.ndarray | int
Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(params=[gumbel_argmax, inverse_cdf])
def draw(request: pytest.FixtureRequest) -> Draw:
    method: Draw = request.param
    return method


def keys(seeds: Numbers, positions: Numbers) -> torch.Tensor:
    pair = np.broadcast_arrays(np.asarray(seeds, np.int64), np.asarray(positions, np.int64))
    return torch.from_numpy(draw_keys(*pair))


def drawn(draw: Draw, seeds: Numbers, positions: Numbers) -> torch.Tensor:
    draw_keys = keys(seeds, positions)
    return draw(LOGITS.expand(len(draw_keys), -1), draw_keys)


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
def test_draws_follow_the_distribution(draw: Draw, seeds: Numbers, positions: Numbers) -> None:
    counts = drawn(draw, seeds, positions).bincount(minlength=8).double()
    assert chi_square(counts, LOGITS.double().softmax(0) * DRAWS) < 5


@pytest.mark.long
def test_draws_of_neighbouring_positions_and_seeds_are_independent(draw: Draw) -> None:
    p = LOGITS.double().softmax(0)
    joint = (p[:, None] * p).flatten() * DRAWS
    first = drawn(draw, np.arange(DRAWS), 7)
    for other in (
        drawn(draw, np.arange(DRAWS), 8),
        drawn(draw, np.arange(DRAWS) + 1, 7),
        drawn(draw, np.arange(DRAWS) + 1, 6),
    ):
        assert chi_square((first * 8 + other).bincount(minlength=64).double(), joint) < 5


def test_noise_of_different_tokens_is_independent(draw: Draw) -> None:
    flat = torch.zeros(DRAWS, 64)
    counts = draw(flat, keys(np.arange(DRAWS), 3)).bincount(minlength=64).double()
    assert chi_square(counts, torch.full((64,), DRAWS / 64, dtype=torch.float64)) < 5


def test_a_row_draws_the_same_wherever_it_stands_in_the_batch(draw: Draw) -> None:
    draw_keys = keys(np.arange(64), np.arange(64) % 5)
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    expected = draw(logits, draw_keys)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert draw(logits[order], draw_keys[order]).equal(expected[order])
    assert draw(logits[9:10], draw_keys[9:10]).equal(expected[9:10])


def test_what_is_filtered_is_never_drawn_even_where_one_token_is_left(draw: Draw) -> None:
    logits = torch.full((DRAWS, 8), -torch.inf)
    logits[:, 5] = -20.0
    assert draw(logits, keys(np.arange(DRAWS), 0)).eq(5).all()


def test_rare_tokens_are_drawn_as_often_as_they_should_be(draw: Draw) -> None:
    logits = torch.zeros(2000, 2000)
    logits[:, :10] = 9.0  # what is left holds 2.4% of the probability
    rare = draw(logits, keys(np.arange(2000), 11)) >= 10
    expected = 1990 / (1990 + 10 * float(np.exp(9.0)))
    assert abs(float(rare.double().mean()) - expected) < 5 * (expected / 2000) ** 0.5


def test_a_vllm_without_the_seam_is_left_alone() -> None:
    assert not install(SimpleNamespace())
    assert not install(SimpleNamespace(model_runner=SimpleNamespace(sampler=SimpleNamespace())))


@pytest.mark.parametrize("vocabulary", [5, SPAN, SPAN + 1, 3 * SPAN, 5000])
def test_the_inverse_is_the_first_token_above_a_plain_cumulative_sum(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(500, vocabulary, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
    logits[:, 3] = 0.0
    draw_keys = keys(np.arange(500), 9)
    ends = logits.double().softmax(-1).cumsum(-1)
    uniform = ((draw_keys >> 31).double() + 0.5) / 2**32
    tokens = inverse_cdf(logits, draw_keys)[:, None]
    lower = (ends - logits.double().softmax(-1)).gather(1, tokens)[:, 0]
    # The sums of spans are in float32.
    assert ((lower < uniform + 1e-6) & (uniform < ends.gather(1, tokens)[:, 0] + 1e-6)).all()
    assert logits.gather(1, tokens).isfinite().all()


def test_the_least_and_the_largest_keys_draw_a_token_that_can_be_drawn() -> None:
    logits = torch.full((2, 3 * SPAN + 7), -torch.inf)
    logits[:, SPAN + 5], logits[:, SPAN + 9] = 0.0, 1.0
    assert inverse_cdf(logits, torch.tensor([0, 2**63 - 1])).tolist() == [SPAN + 5, SPAN + 9]
