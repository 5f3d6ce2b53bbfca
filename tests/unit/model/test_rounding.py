"""Layers that round once more move log-probs by about as much as their dtype rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlcli.model.packed import pack
from rlcli.model.policy import PolicyModel
from rlcli.model.rounding import FP8_UNIT, UNITS, rounded_again, unit_of
from tests.model_fixtures import ragged_rows, tiny_lm

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> PolicyModel:
    return PolicyModel(tiny_lm(), dtype=torch.float32, source="tiny")


def log_probs(model: PolicyModel) -> np.ndarray:
    with torch.no_grad():
        values: np.ndarray = model(pack(ragged_rows(), CPU)).log_probs.float().numpy()
    return values


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_log_probs_move_by_about_what_the_dtype_rounds(model: PolicyModel, dtype: str) -> None:
    exact = log_probs(model)
    half = PolicyModel(tiny_lm().to(getattr(torch, dtype)), dtype=getattr(torch, dtype), source="tiny")
    rounded = log_probs(half)
    with rounded_again(half, UNITS[dtype], seed=1):
        repeated = log_probs(half)
    ratio = np.abs(repeated - rounded).mean() / np.abs(rounded - exact).mean()
    assert 0.5 < ratio < 3.0
    assert np.array_equal(log_probs(half), rounded), "the hooks are gone"


def test_noise_is_proportional_to_the_unit_and_of_its_seed(model: PolicyModel) -> None:
    exact, moved = log_probs(model), {}
    for unit, seed in ((1e-3, 1), (1e-4, 1), (1e-3, 2)):
        with rounded_again(model, unit, seed):
            moved[unit, seed] = log_probs(model) - exact
    with rounded_again(model, 1e-3, 1):
        assert np.array_equal(log_probs(model) - exact, moved[1e-3, 1])
    ratio = np.abs(moved[1e-3, 1]).mean() / np.abs(moved[1e-4, 1]).mean()
    assert ratio == pytest.approx(10, rel=0.15)
    assert not np.array_equal(moved[1e-3, 1], moved[1e-3, 2])


def test_each_arithmetic_has_its_unit() -> None:
    assert [unit_of(dtype, "") for dtype in ("float32", "float16", "bfloat16")] == [2.0**-24, 2.0**-11, 2.0**-8]
    assert unit_of("bfloat16", "fp8") == FP8_UNIT
