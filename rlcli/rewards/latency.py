"""How long single verifications take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Latency:
    """Seconds of single verifications. bounds, counts: a histogram on a logarithmic scale; counts[i] of them
    took bounds[i] to bounds[i + 1]."""

    p50: float
    p90: float
    p99: float
    max: float
    bounds: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Of at least one verification. There are 4 bounds per factor of ten."""
        ordered = sorted(seconds)
        p50, p90, p99 = (ordered[math.ceil(q * len(ordered)) - 1] for q in QUANTILES)
        places = [math.floor(4 * math.log10(max(second, 1e-6))) for second in ordered]
        low, high = places[0], places[-1]
        counts = [0] * (high - low + 1)
        for place in places:
            counts[place - low] += 1
        bounds = tuple(10 ** (place / 4) for place in range(low, high + 2))
        return cls(p50, p90, p99, ordered[-1], bounds, tuple(counts))
