"""Select the most informative prompts: those that the policy solves about every second time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from rlcli.data.prompts.cursor import CursorState, PromptCursor, SelectingState
from rlcli.data.prompts.pass_rates import DECAY, PassRates
from rlcli.errors import DataError

Rule = Literal["uniform", "thompson", "difficulty"]

TARGET = 0.5
"""The pass rate to draw prompts of: a group's rewards then vary most."""
SHARPNESS = 4.0
"""Exponent of `difficulty`. With 4, after eight samples a prompt with four right ones is drawn three times as often as
one without results, and sixty times as often as one with none or all right."""
REST_STEPS = 2
"""A prompt rests while other prompts are drawn for this number of steps, so that neither a refill of the same step nor
the next step draws it again: its new results would be of the same policy."""


def thompson(a: np.ndarray, b: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """The `n` places whose drawn pass rate is nearest to the target, nearest first: int64 `[n]`.

    p̂_i ~ Beta(a_i, b_i), and the n smallest |p̂_i − 1/2| are taken (Thompson sampling; MoPPS, arXiv 2507.04632). So a
    prompt is taken about in proportion to its posterior's density at 1/2: often if it is near, sometimes if it is
    unknown, rarely if it is known to be far.
    """
    indexes: np.ndarray = np.argsort(np.abs(rng.beta(a, b) - TARGET), kind="stable")[:n]
    return indexes


def difficulty(a: np.ndarray, b: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """`n` places drawn without replacement, in proportion to w: int64 `[n]`.

    w_i = E[4 p (1 − p)]^4 under Beta(a_i, b_i), where E[p (1 − p)] = ab / ((a + b)(a + b + 1)). The variance of a
    reward of 0 or 1 is p(1 − p); with it the expected gradient grows and the share of groups whose rewards are all
    equal falls (arXiv 2502.12272, which draws from the prompts of largest p(1 − p)). The n largest ln w_i + G_i, with G
    from the standard Gumbel distribution, are such a draw (arXiv 1903.06059).
    """
    weights = SHARPNESS * np.log(4.0 * a * b / ((a + b) * (a + b + 1.0)))
    indexes: np.ndarray = np.argsort(-(weights + rng.gumbel(size=len(weights))), kind="stable")[:n]
    return indexes


RULES: Mapping[str, Callable[[np.ndarray, np.ndarray, int, np.random.Generator], np.ndarray]] = {
    "thompson": thompson,
    "difficulty": difficulty,
}


class SelectingCursor:
    """Indexes of `count` prompts, chosen by what is known of their pass rates. What is drawn is a function of the seed,
    the draws so far and the results that `record_group` was given, in their order.

    rule: `uniform` walks through the epochs as `PromptCursor` does and leaves retired prompts out; the others choose
    among all prompts that are neither retired nor resting. decay, retire: as in `PassRates`. rest: draws for which a
    drawn prompt rests, at most half as many as there are prompts. If all prompts are retired, all come back.

    >>> cursor = SelectingCursor(8, seed=0, shuffle=True, rule="thompson", retire=0, rest=4)
    >>> for index in cursor.take(4):
    ...     cursor.record_group(index, tokens=100, correct=8, scored=8)
    >>> len(set(cursor.take(4)) & {index for index in range(8) if cursor.rates.solved[index]})
    0
    """

    def __init__(
        self, count: int, seed: int, shuffle: bool, *, rule: Rule, decay: float = DECAY, retire: int, rest: int
    ) -> None:
        self.walk = PromptCursor(count, seed, shuffle)
        self.rule: Rule = rule
        self.rest = min(rest, count // 2)
        self.rates = PassRates(count, decay, retire)
        self.takes = 0

    @property
    def count(self) -> int:
        """Number of prompts."""
        return self.walk.count

    @property
    def draws_without_repeat(self) -> int:
        """1: however many prompts there are, the same ones may be drawn several times in a row."""
        return 1

    def take(self, n: int) -> list[int]:
        """The next `n` indexes. They are different ones, if enough prompts are neither retired nor resting."""
        indexes: list[int] = []
        while len(indexes) < n:
            batch = self._walked(n - len(indexes)) if self.rule == "uniform" else self._chosen(n - len(indexes))
            self.rates.draw(batch)
            indexes += batch
        return indexes

    def record_group(self, index: int, tokens: int, correct: int = 0, scored: int = 0) -> None:
        """A group of prompt `index` is finished: `correct` of its `scored` samples are correct."""
        self.rates.observe(index, correct, scored)

    def metrics(self) -> dict[str, float]:
        """Metrics of the step."""
        return {
            "prompts/seen": float(self.rates.known().mean()),
            "prompts/retired": float(self.rates.retired().mean()),
        }

    def state(self) -> SelectingState:
        """The state that `restored` needs to continue exactly from here; saved in checkpoints as JSON."""
        return {"rule": self.rule, "walk": self.walk.state(), "takes": self.takes, "rates": self.rates.state()}

    def restored(self, state: CursorState) -> SelectingCursor:
        """The cursor with the state `state`, over this one's prompts. Raises `DataError` if their number has changed or
        prompts were drawn by another rule."""
        if "rule" not in state or state["rule"] != self.rule:
            raise DataError(
                f"data: the run drew its prompts by data.sampling = {state.get('rule', 'uniform')} and now has "
                f"{self.rule}",
                "resume with the same data.sampling and data.retire",
            )
        rates = self.rates
        cursor = SelectingCursor(
            self.count, 0, True, rule=self.rule, decay=rates.decay, retire=rates.retire, rest=self.rest
        )
        cursor.walk = self.walk.restored(state["walk"])
        cursor.takes = state["takes"]
        cursor.rates = rates.restored(state["rates"])
        return cursor

    def _walked(self, n: int) -> list[int]:
        """The next `n` prompts of the walk that are not retired."""
        retired = self._retired()
        indexes: list[int] = []
        while len(indexes) < n:
            indexes += [index for index in self.walk.take(n - len(indexes)) if not retired[index]]
        return indexes

    def _chosen(self, n: int) -> list[int]:
        """At most `n` different prompts, at least one."""
        rates, open_to = self.rates, ~self._retired()
        rested = open_to & ((rates.drawn_at < 0) | (rates.drawn_at < rates.draws - self.rest))
        candidates = np.flatnonzero(rested if rested.any() else open_to)
        a, b = rates.posterior()
        rng = np.random.default_rng([self.walk.seed, self.takes])
        self.takes += 1
        return [int(index) for index in candidates[RULES[self.rule](a[candidates], b[candidates], n, rng)]]

    def _retired(self) -> np.ndarray:
        retired = self.rates.retired()
        if retired.all():
            self.rates.bring_back()
            retired = self.rates.retired()
        return retired
