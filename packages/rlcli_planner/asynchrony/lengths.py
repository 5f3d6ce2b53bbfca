"""The lengths of responses: drawn from those that were measured, or from a log-normal distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ASSUMED_MEAN, ASSUMED_SPREAD = 0.35, 0.7
"""Mean length as a share of the limit, and spread of the logarithm, where nothing was measured."""
HALVINGS = 40


@dataclass(frozen=True)
class Lengths:
    """Tokens of responses, at most `most`. measured: int `[groups, samples]` of a run; None: log-normal with this mean
    and standard deviation of the logarithm, half of whose variance lies between prompts."""

    most: int
    mean: float
    spread: float = ASSUMED_SPREAD
    measured: NDArray[np.int64] | None = None

    @classmethod
    def assumed(cls, most: int) -> Lengths:
        return cls(most, max(1.0, ASSUMED_MEAN * most))

    @classmethod
    def of(cls, measured: NDArray[np.int64]) -> Lengths:
        return cls(int(measured.max()), float(measured.mean()), measured=measured)

    def draw(self, steps: int, prompts: int, samples: int, seed: int = 0) -> NDArray[np.int64]:
        """`[steps, prompts, samples]`. Measured groups are drawn whole, with replacement."""
        random = np.random.default_rng(seed)
        if self.measured is not None:
            groups = self.measured[random.integers(len(self.measured), size=(steps, prompts))]
            if groups.shape[-1] != samples:
                places = random.integers(groups.shape[-1], size=(steps, prompts, samples))
                groups = np.take_along_axis(groups, places, 2)
            return groups
        between = random.standard_normal((steps, prompts, 1))
        within = random.standard_normal((steps, prompts, samples))
        normal = self.spread * (between + within) / math.sqrt(2)
        return np.clip(np.rint(self._median(normal) * np.exp(normal)), 1, self.most).astype(np.int64)

    def _median(self, normal: NDArray[np.float64]) -> float:
        """The median for which the lengths, none above the limit, have the mean."""
        low, high = 0.0, float(self.most) * math.exp(4 * self.spread)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if np.minimum(middle * np.exp(normal), self.most).mean() < self.mean:
                low = middle
            else:
                high = middle
        return high

    @property
    def told(self) -> str:
        """In words."""
        if self.measured is None:
            return (
                f"assumed: mean {self.mean:.0f} of at most {self.most} tokens, log-normal with spread {self.spread:g}"
            )
        return f"measured: mean {self.mean:.0f}, longest {self.most} tokens"
