"""Phrases that become common and that change the reward of a response, whatever its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlcli_inspect.signals.response_text import phrases_of, words_of
from rlcli_inspect.signals.strata import Slope, centred, degrees

FIRST_ROWS = 384
"""Rows at the start of the run, whose phrases are those that were common before."""
LEAST, MOST = 0.05, 0.98
"""A phrase is followed in a step in which at least, and at most, these shares of the rows have it."""
MOST_PHRASES, MOST_FOLLOWED = 300, 3000
"""Phrases of one step, the most frequent; and phrases in memory, those that say most about the reward."""
COMMON = 0.2
"""Growth of the share of the rows with a phrase, from which on it has become common; and share that is remembered."""


class Phrases:
    """Follows the phrases of the steps that are added."""

    def __init__(self) -> None:
        self.slopes: dict[str, Slope] = {}
        self.first: Counter[str] = Counter()
        self.first_rows = 0

    def add(
        self, rows: Sequence[Mapping[str, Any]], scores: Sequence[float], strata: Sequence[int]
    ) -> dict[str, float]:
        """Add a step. Returns its common phrases: phrase → share of its rows."""
        import numpy as np

        least = LEAST * len(rows)
        words = [words_of(str(row.get("response") or "")) for row in rows]
        # A phrase is as rare as its rarest word.
        known = {word for word, count in Counter(word for own in words for word in set(own)).items() if count >= least}
        of_rows = [phrases_of(own, known) for own in words]
        counts = Counter(phrase for own in of_rows for phrase in own)
        if self.first_rows < FIRST_ROWS:
            self.first.update(counts)
            self.first_rows += len(rows)
            if self.first_rows >= FIRST_ROWS:
                self.first = Counter({name: count for name, count in self.first.items() if count > 2})
        shares = {name: count / len(rows) for name, count in counts.items() if count >= least}
        names = sorted((name for name, share in shares.items() if share <= MOST), key=lambda name: -shares[name])
        names = names[:MOST_PHRASES]
        if names:
            y = centred(scores, strata)
            has = np.array([[name in own for name in names] for own in of_rows], np.float64)
            x = centred(has, strata)
            self._add_slopes(names, (x * x).sum(axis=0), x.T @ y, float(y @ y), degrees(strata))
        return {name: share for name, share in shares.items() if share >= COMMON}

    def _add_slopes(self, names: Sequence[str], xx: Any, xy: Any, yy: float, count: int) -> None:
        for name, own_xx, own_xy in zip(names, xx.tolist(), xy.tolist(), strict=True):
            slope = self.slopes.setdefault(name, Slope())
            slope.xx, slope.xy = slope.xx + own_xx, slope.xy + own_xy
            slope.yy, slope.count = slope.yy + yy, slope.count + count
        if len(self.slopes) > MOST_FOLLOWED:
            kept = sorted(self.slopes.items(), key=lambda item: -abs(item[1].xy))[: MOST_FOLLOWED // 2]
            self.slopes = dict(kept)

    def share_before(self, phrase: str) -> float:
        """The share of the first rows with a phrase."""
        return self.first[phrase] / self.first_rows if self.first_rows else 0.0

    def rewarded(self, t: float) -> dict[str, Slope]:
        """The phrases that add to the reward, by a slope of at least so many standard errors."""
        return {name: slope for name, slope in self.slopes.items() if slope.t >= t}
