"""Latency of single verifications: quantiles and a histogram."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Latency:
    """Quantiles and histogram of the seconds of single verifications."""

    p50: float
    """Median, in seconds."""
    p90: float
    """90th percentile, in seconds."""
    p99: float
    """99th percentile, in seconds."""
    max: float
    """The slowest, in seconds."""
    bounds: tuple[float, ...]
    """Edges of the histogram's bins in seconds, on a logarithmic scale: 4 per factor of ten."""
    counts: tuple[int, ...]
    """`counts[i]` verifications took `bounds[i]` to `bounds[i + 1]` seconds."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Summarise the seconds of at least one verification."""
        ordered = sorted(seconds)
        p50, p90, p99 = (ordered[math.ceil(q * len(ordered)) - 1] for q in QUANTILES)
        bins = [math.floor(4 * math.log10(max(second, 1e-6))) for second in ordered]
        low, high = bins[0], bins[-1]
        counts = [0] * (high - low + 1)
        for index in bins:
            counts[index - low] += 1
        bounds = tuple(10 ** (index / 4) for index in range(low, high + 2))
        return cls(p50, p90, p99, ordered[-1], bounds, tuple(counts))
