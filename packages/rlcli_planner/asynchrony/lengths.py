"""Response lengths, sampled from measured ones or from a log-normal distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float, Int

ASSUMED_MEAN, ASSUMED_SPREAD = 0.35, 0.7
"""Mean length as a share of the limit, and spread of the logarithm, where nothing was measured."""
HALVINGS = 40


@dataclass(frozen=True)
class Lengths:
    """Distribution of response lengths."""

    limit: int
    """Maximum length in tokens."""
    mean: float
    """Mean length in tokens."""
    spread: float = ASSUMED_SPREAD
    """Standard deviation of the logarithm of the length, if it is log-normal; half of the variance is between
    prompts."""
    measured: Int[np.ndarray, "G S"] | None = None
    """Lengths of a run's responses, one row per group of S samples; None: log-normal."""

    @classmethod
    def assumed(cls, limit: int) -> Lengths:
        return cls(limit, max(1.0, ASSUMED_MEAN * limit))

    @classmethod
    def of(cls, measured: Int[np.ndarray, "G S"]) -> Lengths:
        return cls(int(measured.max()), float(measured.mean()), measured=measured)

    def draw(self, steps: int, prompts: int, samples: int, seed: int = 0) -> Int[np.ndarray, "steps prompts S"]:
        """Sampled lengths. Measured groups are sampled with replacement, each as a whole."""
        random = np.random.default_rng(seed)
        if self.measured is not None:
            groups = self.measured[random.integers(len(self.measured), size=(steps, prompts))]
            if groups.shape[-1] != samples:
                columns = random.integers(groups.shape[-1], size=(steps, prompts, samples))
                groups = np.take_along_axis(groups, columns, 2)
            return groups
        between = random.standard_normal((steps, prompts, 1))
        within = random.standard_normal((steps, prompts, samples))
        normal = self.spread * (between + within) / math.sqrt(2)
        return np.clip(np.rint(self._median(normal) * np.exp(normal)), 1, self.limit).astype(np.int64)

    def _median(self, normal: Float[np.ndarray, "steps prompts S"]) -> float:
        """The median for which the clipped lengths have the mean."""
        low, high = 0.0, float(self.limit) * math.exp(4 * self.spread)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if np.minimum(middle * np.exp(normal), self.limit).mean() < self.mean:
                low = middle
            else:
                high = middle
        return high

    @property
    def description(self) -> str:
        """The distribution in words."""
        if self.measured is None:
            return (
                f"assumed: mean {self.mean:.0f} of at most {self.limit} tokens, log-normal with spread {self.spread:g}"
            )
        return f"measured: mean {self.mean:.0f}, longest {self.limit} tokens"
