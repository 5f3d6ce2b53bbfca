"""Regress the reward on a property of responses, among samples of one prompt that are equally right.

A right answer may well be longer than a wrong one, and rewarded for being right. So samples are compared only within a
stratum: of one prompt, all with the ground truth as their only answer, or all without the ground truth anywhere. There
the reward of an honest verifier is constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli_inspect.signals.sample_rows import Row

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float

Marks = dict[str, float | bool | None]
"""Property of a sample → its value (`sample_record.marks_of`)."""


@dataclass
class Slope:
    """Least-squares slope of the reward on a property, within strata, over all steps so far."""

    xx: float = 0.0
    """Sum of squares of the centred property."""
    xy: float = 0.0
    """Sum of products of the centred property and reward."""
    yy: float = 0.0
    """Sum of squares of the centred reward."""
    count: int = 0
    """Degrees of freedom: observations less one for each stratum."""

    def add(self, x: Float[np.ndarray, " S"], y: Float[np.ndarray, " S"], strata: Sequence[int]) -> None:
        """Add centred values of a step, as `centred` gives them."""
        self.xx += float(x @ x)
        self.xy += float(x @ y)
        self.yy += float(y @ y)
        self.count += degrees(strata)

    @property
    def slope(self) -> float:
        """The slope; 0 without variation."""
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


def strata_of(rows: Sequence[Row], marks: Sequence[Marks]) -> list[int]:
    """The number of each row's stratum; -1: in none, since its correctness is unknown, its stratum has no other row, or
    it is a conversation, which is rewarded for more than its last turn."""
    keys = [
        (str(row["prompt_id"]), "right" if row_marks["right"] else "absent")
        if (row_marks["right"] or row_marks["truth"]) and (row.get("turns") or 1) == 1
        else None
        for row, row_marks in zip(rows, marks, strict=True)
    ]
    numbers: dict[tuple[str, str], int] = {}
    numbered = [-1 if key is None else numbers.setdefault(key, len(numbers)) for key in keys]
    sizes = {number: numbered.count(number) for number in set(numbered)}
    return [number if sizes[number] > 1 else -1 for number in numbered]


def degrees(strata: Sequence[int]) -> int:
    """Degrees of freedom: observations less one for each stratum.

    >>> degrees([0, 0, 0, -1, 1, 1])
    3
    """
    assigned = [number for number in strata if number >= 0]
    return len(assigned) - len(set(assigned))


def centred(values: Sequence[float] | Float[np.ndarray, "S ..."], strata: Sequence[int]) -> Float[np.ndarray, "S ..."]:
    """Values less the mean of their stratum, in float64; 0 for samples without a stratum.

    >>> centred([1.0, 3.0, 7.0], [0, 0, -1]).tolist()
    [-1.0, 1.0, 0.0]
    """
    import numpy as np

    array = np.asarray(values, np.float64)
    stratum_ids = np.asarray(strata)
    result: np.ndarray = np.zeros_like(array)
    for number in set(stratum_ids[stratum_ids >= 0].tolist()):
        members = stratum_ids == number
        result[members] = array[members] - array[members].mean(axis=0)
    return result
