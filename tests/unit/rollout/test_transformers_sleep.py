"""Memory that the engine `transformers` frees while a trainer uses the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from rlcli.rollout.engine import Sleep
from rlcli.rollout.transformers_engine import TransformersEngine


@pytest.mark.parametrize(("sleep", "freed"), [("all", True), ("none", False)])
def test_weights_are_freed_if_the_run_asks_for_it(sleep: Sleep, freed: bool) -> None:
    engine = object.__new__(TransformersEngine)
    engine._lm = nn.Linear(3, 2)
    engine._shapes = {name: parameter.shape for name, parameter in engine._lm.named_parameters()}
    engine.spec = SimpleNamespace(weights_follow=True, sleep=sleep)  # type: ignore[assignment]
    initial_weight = engine._lm.weight.detach().clone()
    engine.sleep()
    assert engine._lm.weight.numel() == (0 if freed else 6)
    engine.wake_weights()
    assert engine._lm.weight.shape == (2, 3)
    assert freed or engine._lm.weight.equal(initial_weight)
