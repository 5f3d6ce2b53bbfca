from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcli.model.optim import Schedule, build_optimizer, clip_grad_norm, lr_at
from rlcli.model.policy import PolicyModel
from tests.model_fixtures import tiny_lm


def course(schedule: Schedule, steps: int = 10, warmup_steps: int = 0, min_fraction: float = 0.0) -> list[float]:
    return [
        lr_at(i, peak=2.0, steps=steps, warmup_steps=warmup_steps, schedule=schedule, min_fraction=min_fraction)
        for i in range(steps + 1)
    ]


def test_warm_up_rises_in_equal_parts_to_the_peak() -> None:
    assert course("constant", warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, 2.0] + [2.0] * 7)


def test_linear_falls_evenly_to_its_end() -> None:
    assert course("linear", steps=4, min_fraction=0.5) == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0])


def test_cosine_is_half_way_at_half_time() -> None:
    rates = course("cosine", min_fraction=0.1)
    assert rates[0] == 2.0
    assert rates[5] == pytest.approx(1.1)
    assert rates[10] == pytest.approx(0.2)
    assert rates[2] == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi * 0.2)) / 2)


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    steps=st.integers(1, 50),
    warmup=st.floats(0, 1),
    min_fraction=st.floats(0, 1),
)
def test_rates_rise_then_never_rise_again_and_stay_within_bounds(
    schedule: Schedule, steps: int, warmup: float, min_fraction: float
) -> None:
    warmup_steps = int(warmup * steps)
    rates = course(schedule, steps, warmup_steps, min_fraction)
    assert all(0 < rate <= 2.0 + 1e-9 for rate in rates[:steps])
    rising, falling = rates[:warmup_steps], rates[warmup_steps:]
    assert rising == sorted(rising)
    assert all(a >= b - 1e-9 for a, b in pairwise(falling))
    assert min(falling) >= 2.0 * min_fraction - 1e-9


def test_only_matrices_decay() -> None:
    policy = PolicyModel(tiny_lm(), dtype=torch.float32, source="tiny")
    initial = {name: p.detach().clone() for name, p in policy.named_parameters()}
    optimizer = build_optimizer(policy, lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in policy.named_parameters():
        expected = initial[name] * (0.95 if parameter.ndim > 1 else 1.0)
        torch.testing.assert_close(parameter.detach(), expected, msg=name)


def test_clipping_gives_the_norm_before_and_scales_to_the_bound() -> None:
    policy = PolicyModel(tiny_lm(), dtype=torch.float32, source="tiny")
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(p.numel() for p in policy.parameters())
    assert clip_grad_norm(policy, 3.0) == pytest.approx(math.sqrt(count), rel=1e-5)
    assert clip_grad_norm(policy, 3.0) == pytest.approx(3.0, rel=1e-4)
    next(policy.parameters()).grad[0, 0] = math.nan
    assert math.isnan(clip_grad_norm(policy, 3.0))
