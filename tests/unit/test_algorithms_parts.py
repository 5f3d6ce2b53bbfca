"""The parts of an algorithm against plain-Python references written from the papers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.algorithms import losses
from rlcli.errors import UnknownName

relaxed = settings(deadline=None)  # the first call of a torch operation is slow
log_probs = st.floats(-60.0, 0.0)


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- policy loss ------------------------------------------------------------------------------------------------------


def ppo_reference(
    new: float, old: float, advantage: float, low: float, high: float, dual: float | None
) -> tuple[float, bool, bool]:
    rho = math.exp(min(20.0, max(-20.0, new - old)))
    if advantage >= 0:
        clipped_high = advantage > 0 and rho > 1 + high
        return -advantage * min(rho, 1 + high), False, clipped_high
    if dual is not None and rho > dual:
        return -advantage * dual, False, True
    return -advantage * max(rho, 1 - low), rho < 1 - low, False


ppo_tokens = st.lists(
    st.tuples(log_probs, log_probs | st.none(), st.sampled_from([0.0, 1.0, -1.0]) | st.floats(-5.0, 5.0)), max_size=8
)


@relaxed
@given(
    tokens=ppo_tokens,
    low=st.sampled_from([0.0, 0.2, 0.8]),
    high=st.sampled_from([0.0, 0.28, 2.0]),
    dual=st.none() | st.sampled_from([3.5, 10.0]),
)
def test_ppo_equals_the_reference(
    tokens: list[tuple[float, float | None, float]], low: float, high: float, dual: float | None
) -> None:
    # An old log-prob of None: the same as the new one, so that ratios of exactly 1 are common.
    filled = [(new, new if old is None else old, advantage) for new, old, advantage in tokens]
    new, old, advantage = (float64([token[i] for token in filled]) for i in range(3))
    term = losses.get("ppo")(new, old, advantage, clip_low=low, clip_high=high, dual_clip=dual)
    expected = [ppo_reference(*token, low, high, dual) for token in filled]
    torch.testing.assert_close(term.loss, float64([loss for loss, _, _ in expected]), rtol=1e-12, atol=1e-12)
    assert term.clipped_low.tolist() == [clipped for _, clipped, _ in expected]
    assert term.clipped_high.tolist() == [clipped for _, _, clipped in expected]


@pytest.mark.parametrize("dual", [None, 3.0])
def test_ppo_gradient_is_right_and_stops_exactly_at_clipped_tokens(dual: float | None) -> None:
    ratios = [0.01, 0.5, 0.79, 0.81, 0.999, 1.001, 1.19, 1.21, 2.0, 2.9, 3.1, 50.0]
    new = float64(ratios * 2).log().requires_grad_()
    old, advantage = torch.zeros_like(new), float64([1.5] * len(ratios) + [-0.5] * len(ratios))

    def loss(log_probs: Tensor) -> losses.TokenLoss:
        return losses.ppo(log_probs, old, advantage, dual_clip=dual)

    assert torch.autograd.gradcheck(lambda x: loss(x).loss, new)
    term = loss(new)
    (gradient,) = torch.autograd.grad(term.loss.sum(), new)
    assert (gradient == 0).tolist() == (term.clipped_low | term.clipped_high).tolist()


def test_ppo_at_ratio_one_is_the_policy_gradient_even_without_any_clip_range() -> None:
    new, advantage = float64([-1.0, -2.0, -3.0]).requires_grad_(), float64([1.0, -2.0, 0.0])
    term = losses.ppo(new, new.detach(), advantage, clip_low=0.0, clip_high=0.0)
    (gradient,) = torch.autograd.grad(term.loss.sum(), new)
    assert gradient.tolist() == [-1.0, 2.0, 0.0]
    assert not (term.clipped_low | term.clipped_high).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ppo_stays_finite_at_extreme_ratios(dtype: torch.dtype) -> None:
    new = torch.tensor([-1e4, 0.0, -1e4, 0.0], dtype=dtype, requires_grad=True)
    old = torch.tensor([0.0, -1e4, 0.0, -1e4], dtype=dtype)
    loss = losses.ppo(new, old, torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=dtype)).loss
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert torch.isfinite(loss).all()
    assert gradient.tolist() == [0.0] * 4


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "wrong", "near"),
    [
        (losses, "pp0", "ppo"),
    ],
)
def test_an_unknown_name_is_refused_with_the_near_ones(module: object, wrong: str, near: str) -> None:
    with pytest.raises(UnknownName, match=f"'{wrong}'.*{near}"):
        module.get(wrong)  # type: ignore[attr-defined]
