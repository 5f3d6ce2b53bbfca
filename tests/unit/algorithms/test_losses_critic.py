"""The losses of the critic and of the implicit process reward model."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.algorithms.aggregation import Denominators, seq_mean_token_mean
from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.losses.critic import implicit_reward_loss, process_rewards, value_loss

relaxed = settings(deadline=None, max_examples=60)
values = st.floats(-10.0, 10.0)
log_probs = st.floats(-60.0, 0.0)


def float64(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@relaxed
@given(
    tokens=st.lists(st.tuples(values, values | st.none(), values), max_size=8),
    clip=st.none() | st.sampled_from([0.2, 0.5, 3.0]),
)
def test_value_loss_equals_the_reference(tokens: list[tuple[float, float | None, float]], clip: float | None) -> None:
    # An old value of None: the same as the new one.
    filled = [(v, v if old is None else old, target) for v, old, target in tokens]
    term = value_loss(*(float64([token[i] for token in filled]) for i in range(3)), clip=clip)
    expected, low, high = [], [], []
    for v, old, target in filled:
        plain, held = (v - target) ** 2, v
        if clip is not None:
            held = old - clip if v < old - clip else old + clip if v > old + clip else v
        expected.append(0.5 * max(plain, (held - target) ** 2))
        low.append(v < held and (held - target) ** 2 > plain)
        high.append(v > held and (held - target) ** 2 > plain)
    torch.testing.assert_close(term.loss, float64(expected), rtol=1e-12, atol=1e-12)
    assert term.clipped_low.tolist() == low
    assert term.clipped_high.tolist() == high


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_value_gradient_is_right_and_stops_at_clipped_values(
    clip: float | None,
) -> None:
    # Moved by −2, −0.3, 0, 0.3 and 2, with the return below, above, and within what has been passed.
    new = float64([-2.0, -0.3, 0.0, 0.3, 2.0] * 3).requires_grad_()
    returns = float64([-4.0] * 5 + [4.0] * 5 + [-1.9, -1.9, 0.1, 1.9, 1.9])
    old = torch.zeros_like(new)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, clip=clip).loss, new)
    term = value_loss(new, old, returns, clip=clip)
    (gradient,) = torch.autograd.grad(term.loss.sum(), new)
    stopped = [] if clip is None else [0, 9, 10, 14]
    assert (gradient == 0).nonzero()[:, 0].tolist() == stopped
    assert (term.clipped_low | term.clipped_high).nonzero()[:, 0].tolist() == stopped
    unclipped = [i for i in range(15) if i not in stopped]
    torch.testing.assert_close(gradient[unclipped], (new - returns).detach()[unclipped])


@relaxed
@given(
    responses=st.lists(
        st.tuples(st.lists(st.tuples(log_probs, log_probs), max_size=4), st.sampled_from([0.0, 1.0, 0.25])),
        min_size=1,
        max_size=5,
    ),
    beta=st.sampled_from([0.05, 1.0]),
)
def test_implicit_reward_loss_and_its_gradient_equal_the_reference(
    responses: list[tuple[list[tuple[float, float]], float]], beta: float
) -> None:
    new = float64([pair[0] for tokens, _ in responses for pair in tokens]).requires_grad_()
    reference = float64([pair[1] for tokens, _ in responses for pair in tokens])
    rewards, lengths = float64([reward for _, reward in responses]), torch.tensor([len(t) for t, _ in responses])
    sequence = torch.repeat_interleave(torch.arange(len(responses)), lengths)
    term = implicit_reward_loss(new, reference, rewards, sequence, lengths, beta=beta)
    assert not (term.clipped_low | term.clipped_high).any()
    mean = seq_mean_token_mean(
        term.loss, LossInputs(sequence=sequence, lengths=lengths), Denominators(0, len(responses), 0)
    )
    (gradient,) = torch.autograd.grad(mean, new)
    expected, slopes = 0.0, []
    for tokens, reward in responses:
        z = math.fsum(beta * (a - b) for a, b in tokens)
        p = 1 / (1 + math.exp(-z))
        # log σ(−z) = log σ(z) − z
        log_p = -math.log1p(math.exp(-z)) if z > 0 else z - math.log1p(math.exp(z))
        expected += -(reward * log_p + (1 - reward) * (log_p - z)) if tokens else 0.0
        slopes += [beta * (p - reward) / len(responses)] * len(tokens)
    assert mean.item() == pytest.approx(expected / len(responses), rel=1e-10, abs=1e-12)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)


def test_implicit_reward_gradient_is_that_of_the_value() -> None:
    sequence, lengths, rewards = torch.tensor([0, 0, 2]), torch.tensor([2, 0, 1]), float64([1.0, 1.0, 0.0])
    new, reference = float64([-1.0, -2.0, -0.5]).requires_grad_(), float64([-2.0, -0.1, -9.0])
    assert torch.autograd.gradcheck(
        lambda x: implicit_reward_loss(x, reference, rewards, sequence, lengths, beta=0.5).loss, new
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_implicit_reward_loss_stays_finite_and_keeps_its_type(dtype: torch.dtype) -> None:
    new = torch.tensor([0.0, -1e3, 0.0], dtype=dtype, requires_grad=True)
    reference = torch.tensor([-1e5, 0.0, -1e3], dtype=dtype)
    rewards = torch.tensor([0.0, 1.0, 1.0], dtype=dtype)
    loss = implicit_reward_loss(new, reference, rewards, torch.arange(3), torch.ones(3, dtype=torch.int64)).loss
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert loss.dtype == dtype
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()


def test_nothing_to_learn_from_gives_empty_losses() -> None:
    nothing, nowhere = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    assert value_loss(nothing, nothing.detach(), nothing.detach(), clip=0.5).loss.shape == (0,)
    for sequences in (0, 2):
        lengths = torch.zeros(sequences, dtype=torch.int64)
        loss = implicit_reward_loss(nothing, nothing.detach(), torch.ones(sequences), nowhere, lengths).loss
        loss.sum().backward()
        assert loss.shape == (0,)


@relaxed
@given(tokens=st.lists(st.tuples(log_probs, log_probs), max_size=6), beta=st.sampled_from([None, 0.5]))
def test_process_rewards_are_scaled_log_ratios(tokens: list[tuple[float, float]], beta: float | None) -> None:
    new, reference = (float64([pair[i] for pair in tokens]) for i in range(2))
    got = process_rewards(new, reference) if beta is None else process_rewards(new, reference, beta=beta)
    assert got.tolist() == pytest.approx([(0.05 if beta is None else beta) * (a - b) for a, b in tokens])
