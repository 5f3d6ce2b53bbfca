"""How much a property of a response changes its reward among samples of one prompt that are equally right.

A right answer may well be longer than a wrong one, and rewarded for being right. So samples are compared only within a
stratum: of one prompt, all with the ground truth as their only answer, or all without the ground truth anywhere. There
the reward of an honest verifier is constant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Row = Mapping[str, Any]


@dataclass
class Slope:
    """The least-squares slope of the reward on a property, within strata, over all steps so far. count: observations
    less one for each stratum."""

    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    count: int = 0

    def add(self, x: np.ndarray, y: np.ndarray, strata: Sequence[int]) -> None:
        """Add centred values of a step, as `centred` gives them."""
        self.xx += float(x @ x)
        self.xy += float(x @ y)
        self.yy += float(y @ y)
        self.count += degrees(strata)

    @property
    def slope(self) -> float:
        return self.xy / self.xx if self.xx else 0.0

    @property
    def fit(self) -> float:
        """The share of the reward's variance within strata that the property explains."""
        return self.slope * self.xy / self.yy if self.yy else 0.0

    @property
    def t(self) -> float:
        """The slope in standard errors; infinite for an exact relation."""
        if self.count < 3 or not self.xx or not self.xy:
            return 0.0
        rest = max(0.0, self.yy - self.slope * self.xy) / (self.count - 1)
        return self.slope / math.sqrt(rest / self.xx) if rest > 1e-12 * self.yy else math.copysign(math.inf, self.xy)


def strata_of(rows: Sequence[Row], marks: Sequence[Mapping[str, Any]]) -> list[int]:
    """The number of each row's stratum; -1: it is in none, since it cannot be told whether it is right, no other row is
    in its stratum, or it is a conversation, which is rewarded for more than its last turn."""
    keys = [
        (str(row["prompt_id"]), "right" if own["right"] else "absent")
        if (own["right"] or own["truth"]) and (row.get("turns") or 1) == 1
        else None
        for row, own in zip(rows, marks, strict=True)
    ]
    numbers: dict[Any, int] = {}
    found = [-1 if key is None else numbers.setdefault(key, len(numbers)) for key in keys]
    sizes = {number: found.count(number) for number in set(found)}
    return [number if sizes[number] > 1 else -1 for number in found]


def degrees(strata: Sequence[int]) -> int:
    """Observations less one for each stratum.

    >>> degrees([0, 0, 0, -1, 1, 1])
    3
    """
    own = [number for number in strata if number >= 0]
    return len(own) - len(set(own))


def centred(values: Sequence[float] | np.ndarray, strata: Sequence[int]) -> np.ndarray:
    """float64 `[N]` or `[N, C]`: values less the mean of their stratum; 0 outside of any.

    >>> centred([1.0, 3.0, 7.0], [0, 0, -1]).tolist()
    [-1.0, 1.0, 0.0]
    """
    import numpy as np

    array = np.asarray(values, np.float64)
    places = np.asarray(strata)
    result: np.ndarray = np.zeros_like(array)
    for number in set(places[places >= 0].tolist()):
        own = places == number
        result[own] = array[own] - array[own].mean(axis=0)
    return result
