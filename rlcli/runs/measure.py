"""The figure that shows whether a run learns: the mean reward, or the loss where the dataset gives the responses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Measure(NamedTuple):
    """key: its metric. name: what it is called. in_words: on the axis of a curve."""

    key: str
    name: str
    in_words: str

    def of(self, metrics: Mapping[str, Any]) -> float:
        """Its value in a step; NaN if it is missing or not a number.

        >>> LOSS.of({"update/policy_loss": 0.5}), REWARD.of({"reward/mean": None})
        (0.5, nan)
        """
        value = metrics.get(self.key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


REWARD = Measure("reward/mean", "reward", "mean reward")
LOSS = Measure("update/policy_loss", "loss", "loss (nats a token)")
"""Every given response counts as right: its reward of 1 says nothing."""


def measure_of(config: Mapping[str, Any]) -> Measure:
    """The measure of a run with this configuration, in plain values.

    >>> measure_of({"data": {"response": "response"}}).name, measure_of({}).name
    ('loss', 'reward')
    """
    data = config.get("data")
    return LOSS if isinstance(data, Mapping) and data.get("response") else REWARD
