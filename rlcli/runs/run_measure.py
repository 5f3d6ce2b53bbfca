"""The figures that show whether a run learns: the mean reward, or the loss where the dataset gives the responses; and
the score of an evaluation, by which a checkpoint is the best."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple


class Measure(NamedTuple):
    """The metric that shows whether a run learns."""

    key: str
    """Name of the metric."""
    name: str
    """Short name for a person."""
    in_words: str
    """Label on the axis of a curve."""

    def of(self, metrics: Mapping[str, object]) -> float:
        """Its value in a step; NaN if it is missing or not a number.

        >>> LOSS.of({"update/policy_loss": 0.5}), REWARD.of({"reward/mean": None})
        (0.5, nan)
        """
        value = metrics.get(self.key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


REWARD = Measure("reward/mean", "reward", "mean reward")
LOSS = Measure("update/policy_loss", "loss", "loss (nats a token)")
"""For datasets with responses: each counts as correct, so its reward of 1 means nothing."""


def measure_of(config: Mapping[str, object]) -> Measure:
    """The measure of a run with this configuration, in plain values.

    >>> measure_of({"data": {"response": "response"}}).name, measure_of({}).name
    ('loss', 'reward')
    """
    data = config.get("data")
    return LOSS if isinstance(data, Mapping) and data.get("response") else REWARD


MEAN = "mean@1"
"""The mean score of an evaluation's samples."""


def score_of(means: Mapping[str, float], best_by: str) -> float | None:
    """The score of an evaluation by `checkpoint.best_by`; None if it was not measured. means: measure → mean.

    Older runs have the mean score only as mean@k for k samples a prompt.

    >>> score_of({"pass@1": 1.0, "mean@4": 0.25}, "mean@1"), score_of({"pass@1": 1.0}, "pass@4")
    (0.25, None)
    """
    if best_by == MEAN and MEAN not in means:
        return next((mean for name, mean in means.items() if re.fullmatch(r"mean@\d+", name)), None)
    return means.get(best_by)


def means_of(report: Mapping[str, object]) -> dict[str, float]:
    """Measure → mean, from the report of an evaluation, which may be damaged.

    >>> means_of({"pass": {"pass@1": {"mean": 0.5, "low": 0.2}}, "mean": None, "prompts": 8})
    {'pass@1': 0.5}
    """
    groups = (report.get(kind) for kind in ("pass", "maj", "mean"))
    estimates = {name: estimate for group in groups if isinstance(group, Mapping) for name, estimate in group.items()}
    means = {name: estimate.get("mean") for name, estimate in estimates.items() if isinstance(estimate, Mapping)}
    return {
        name: float(mean)
        for name, mean in means.items()
        if isinstance(mean, int | float) and not isinstance(mean, bool) and math.isfinite(mean)
    }
