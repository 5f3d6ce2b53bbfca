"""Estimates of each prompt's pass rate: a Beta posterior whose evidence decays, and which prompts are solved."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

PRIOR = 1.0
"""α and β of a prompt without results: every pass rate is equally likely."""

DECAY = 0.5
"""Weight of a prompt's earlier results after as many draws as there are prompts."""


class PassRatesState(TypedDict):
    """The state of `PassRates`, as checkpoints hold it: a column for each of its arrays."""

    draws: int
    """Prompts drawn so far."""
    rows: list[int]
    """Prompts that were drawn or scored; the columns have a value for each."""
    right: list[float]
    """Right samples, decayed until the prompt's last result."""
    wrong: list[float]
    """Wrong samples, decayed in the same way."""
    counted_at: list[int]
    """Value of `draws` at its last result."""
    drawn_at: list[int]
    """Value of `draws` when it was last drawn; -1: never."""
    solved: list[int]
    """Last groups in a row with right samples only."""


class PassRates:
    """Pass rates of `count` prompts, each the success rate of Bernoulli trials with a Beta posterior (MoPPS, arXiv
    2507.04632), of which earlier evidence counts less, since the policy has changed:

        α = 1 + Σ_g r_g · decay^((T − t_g) / count)        β = 1 + Σ_g w_g · decay^((T − t_g) / count)

    over the prompt's groups g with r_g right and w_g wrong samples, scored when t_g prompts had been drawn, of T by
    now. Time is counted in epochs of draws, so `decay` means the same for datasets and batches of any size. MoPPS
    discounts at a prompt's own results instead, so that a prompt which was never solved stays unlikely forever.

    retire: groups in a row with right samples only, after which a prompt is retired; 0: none is.
    """

    def __init__(self, count: int, decay: float, retire: int = 0) -> None:
        assert count > 0, "pass rates are of prompts"
        assert 0.0 <= decay <= 1.0, decay
        self.count, self.decay, self.retire = count, decay, retire
        self.draws = 0
        self.right, self.wrong = np.zeros(count), np.zeros(count)
        """Right and wrong samples of each prompt, decayed until its last result."""
        self.counted_at: np.ndarray = np.zeros(count, np.int64)
        """Value of `draws` at the last result."""
        self.drawn_at: np.ndarray = np.full(count, -1, np.int64)
        """Value of `draws` when it was last drawn; -1: never."""
        self.solved: np.ndarray = np.zeros(count, np.int64)
        """Last groups in a row with right samples only."""

    def draw(self, indexes: list[int]) -> None:
        """Record that these prompts are drawn, in this order."""
        self.drawn_at[indexes] = self.draws + np.arange(len(indexes))
        self.draws += len(indexes)

    def observe(self, index: int, correct: int, scored: int) -> None:
        """Record that `correct` of the `scored` samples of a group of prompt `index` are correct."""
        assert 0 <= correct <= scored, (correct, scored)
        if not scored:
            return
        decayed = self.decay ** ((self.draws - int(self.counted_at[index])) / self.count)
        self.right[index] = self.right[index] * decayed + correct
        self.wrong[index] = self.wrong[index] * decayed + (scored - correct)
        self.counted_at[index] = self.draws
        self.solved[index] = self.solved[index] + 1 if correct == scored else 0

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """α and β of each prompt at this time: float64 `[count]`."""
        decayed = self.decay ** ((self.draws - self.counted_at) / self.count)
        return PRIOR + self.right * decayed, PRIOR + self.wrong * decayed

    def retired(self) -> np.ndarray:
        """Mask of the retired prompts: bool `[count]`."""
        mask: np.ndarray = self.solved >= self.retire if self.retire else np.zeros(self.count, bool)
        return mask

    def bring_back(self) -> None:
        """Draw retired prompts again; one more solved group retires each."""
        self.solved = np.minimum(self.solved, max(self.retire - 1, 0))

    def known(self) -> np.ndarray:
        """Mask of the prompts that were used at least once: bool `[count]`."""
        mask: np.ndarray = self.drawn_at >= 0
        return mask

    def state(self) -> PassRatesState:
        """Everything, as JSON values: the prompts that were drawn or scored, and a column for each field."""
        rows = np.flatnonzero(self.known() | (self.right + self.wrong > 0))
        return {
            "draws": self.draws,
            "rows": rows.tolist(),
            "right": self.right[rows].tolist(),
            "wrong": self.wrong[rows].tolist(),
            "counted_at": self.counted_at[rows].tolist(),
            "drawn_at": self.drawn_at[rows].tolist(),
            "solved": self.solved[rows].tolist(),
        }

    def restored(self, state: PassRatesState) -> PassRates:
        """The state `state` of as many prompts, with this decay and this number of groups to retire after."""
        rates = PassRates(self.count, self.decay, self.retire)
        rates.draws = state["draws"]
        rows = np.array(state["rows"], np.int64)
        rates.right[rows], rates.wrong[rows] = state["right"], state["wrong"]
        rates.counted_at[rows], rates.drawn_at[rows] = state["counted_at"], state["drawn_at"]
        rates.solved[rows] = state["solved"]
        return rates
