"""Phrases that become common and that change the reward of a response, whatever its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcli_inspect.signals.response_text import phrases_of, words_of
from rlcli_inspect.signals.sample_rows import Row
from rlcli_inspect.signals.strata import Slope, centred, degrees

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float

FIRST_ROWS = 384
"""Rows at the start of the run, from which the baseline shares of phrases are computed."""
MIN_SHARE, MAX_SHARE = 0.05, 0.98
"""A phrase is counted in a step if its share of the rows is in this range."""
MAX_PHRASES, MAX_TRACKED = 300, 3000
"""Most frequent phrases of one step; phrases in memory, those with the strongest relation to the reward."""
COMMON = 0.2
"""Growth of the share of rows with a phrase from which it has become common; minimum share that is recorded."""


class Phrases:
    """Tracks the phrases of the steps that are added."""

    def __init__(self) -> None:
        self.slopes: dict[str, Slope] = {}
        self.first: Counter[str] = Counter()
        self.first_rows = 0

    def add(self, rows: Sequence[Row], scores: Sequence[float], strata: Sequence[int]) -> dict[str, float]:
        """Add a step. Returns its common phrases: phrase → share of its rows."""
        import numpy as np

        least = MIN_SHARE * len(rows)
        words = [words_of(str(row.get("response") or "")) for row in rows]
        # A phrase is as rare as its rarest word.
        known = {
            word
            for word, count in Counter(word for row_words in words for word in set(row_words)).items()
            if count >= least
        }
        of_rows = [phrases_of(row_words, known) for row_words in words]
        counts = Counter(phrase for row_words in of_rows for phrase in row_words)
        if self.first_rows < FIRST_ROWS:
            self.first.update(counts)
            self.first_rows += len(rows)
            if self.first_rows >= FIRST_ROWS:
                self.first = Counter({name: count for name, count in self.first.items() if count > 2})
        shares = {name: count / len(rows) for name, count in counts.items() if count >= least}
        names = sorted((name for name, share in shares.items() if share <= MAX_SHARE), key=lambda name: -shares[name])
        names = names[:MAX_PHRASES]
        if names:
            y = centred(scores, strata)
            has = np.array([[name in row_words for name in names] for row_words in of_rows], np.float64)
            x = centred(has, strata)
            self._add_slopes(names, (x * x).sum(axis=0), x.T @ y, float(y @ y), degrees(strata))
        return {name: share for name, share in shares.items() if share >= COMMON}

    def _add_slopes(
        self, names: Sequence[str], xx: Float[np.ndarray, " P"], xy: Float[np.ndarray, " P"], yy: float, count: int
    ) -> None:
        for name, phrase_xx, phrase_xy in zip(names, xx.tolist(), xy.tolist(), strict=True):
            slope = self.slopes.setdefault(name, Slope())
            slope.xx, slope.xy = slope.xx + phrase_xx, slope.xy + phrase_xy
            slope.yy, slope.count = slope.yy + yy, slope.count + count
        if len(self.slopes) > MAX_TRACKED:
            strongest = sorted(self.slopes.items(), key=lambda item: -abs(item[1].xy))[: MAX_TRACKED // 2]
            self.slopes = dict(strongest)

    def share_before(self, phrase: str) -> float:
        """The share of the first rows with a phrase."""
        return self.first[phrase] / self.first_rows if self.first_rows else 0.0

    def rewarded(self, t: float) -> dict[str, Slope]:
        """The phrases that add to the reward, by a slope of at least `t` standard errors."""
        return {name: slope for name, slope in self.slopes.items() if slope.t >= t}
