"""The prompt order: a seeded walk over the dataset that can stop and resume anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, final

import numpy as np

from rlcli.data.prompts.pass_rates import PassRatesState
from rlcli.errors import DataError

RESUME = "resume with the same data.path, weights and data.mix, or start a new run from the current state of this one"


@final
class WalkState(TypedDict):
    """The state of a `PromptCursor`, as checkpoints hold it."""

    count: int
    """Number of prompts."""
    seed: int
    """Seed of the order."""
    shuffle: bool
    """True if epochs are shuffled."""
    epoch: int
    """Number of the current epoch, from 0."""
    position: int
    """Prompts of that epoch that were drawn."""


@final
class SelectingState(TypedDict):
    """The state of a `SelectingCursor`."""

    rule: str
    """`data.sampling`."""
    walk: WalkState
    """The order of prompts that are drawn one after the other."""
    takes: int
    """Random draws so far."""
    rates: PassRatesState
    """Pass rates of the prompts."""


@final
class MixedState(TypedDict):
    """The state of a `MixedCursor`."""

    sets: list[str]
    """Names of the datasets."""
    weights: list[float]
    """Weight of each."""
    unit: str
    """`data.mix`."""
    cursors: list[WalkState | SelectingState]
    """State of each set's cursor."""
    drawn: list[int]
    """Prompts drawn from each set."""
    finished: list[int]
    """Finished groups of each set."""
    tokens: list[int]
    """Tokens of each set's finished groups."""


CursorState = WalkState | SelectingState | MixedState
"""The state of any cursor; a run may resume with a config that selects another cursor, which refuses it."""


class PromptCursor:
    """Indexes of `count` prompts, epoch after epoch; each epoch holds every index once, in its own order.

    The order is a function of (seed, epoch) alone: no global random state is read or changed.

    >>> cursor = PromptCursor(count=3, seed=0, shuffle=False)
    >>> cursor.take(4), cursor.take(2)
    ([0, 1, 2, 0], [1, 2])
    """

    def __init__(self, count: int, seed: int, shuffle: bool) -> None:
        assert count > 0, "a cursor needs prompts"
        self.count = count
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        self._order = self._order_of(0)

    @property
    def draws_without_repeat(self) -> int:
        """Number of prompts that are all drawn before one is drawn again."""
        return self.count

    def take(self, n: int) -> list[int]:
        """The next `n` indexes; they may span epochs."""
        indexes: list[int] = []
        while len(indexes) < n:
            if self.position == self.count:
                self.epoch += 1
                self.position = 0
                self._order = self._order_of(self.epoch)
            end = min(self.count, self.position + n - len(indexes))
            indexes += self._order[self.position : end].tolist()
            self.position = end
        return indexes

    def record_group(self, index: int, tokens: int, correct: int = 0, scored: int = 0) -> None:
        """Record a finished group of prompt `index`. No effect here (see `MixedCursor`, `SelectingCursor`)."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the step: none."""
        return {}

    def state(self) -> WalkState:
        """The state that `restored` needs to continue exactly from here; saved in checkpoints as JSON."""
        return {
            "count": self.count,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "position": self.position,
        }

    def restored(self, state: CursorState) -> PromptCursor:
        """The cursor with the state `state`, over this one's prompts. Raises `DataError` if their number has changed or
        the run had several sets with weights."""
        if "sets" in state:
            saved_weights = shown(state["sets"], state["weights"], state["unit"])
            raise DataError(f"data: the run began with {saved_weights} and now has no weights", RESUME)
        if "rule" in state:
            raise DataError(
                f"data: the run began with data.sampling = {state['rule']} or data.retire, and now has neither",
                "resume with the same data.sampling and data.retire",
            )
        if state["count"] != self.count:
            raise DataError(
                f"data: the run began on {state['count']} prompts and the dataset now has {self.count}",
                "resume with the same data and the same data.max_prompt_tokens",
            )
        cursor = PromptCursor(self.count, state["seed"], state["shuffle"])
        cursor.epoch = state["epoch"]
        cursor.position = state["position"]
        cursor._order = cursor._order_of(cursor.epoch)
        return cursor

    def _order_of(self, epoch: int) -> np.ndarray:
        order = np.arange(self.count)
        return np.random.default_rng([self.seed, epoch]).permutation(order) if self.shuffle else order


def shown(names: Sequence[str] | None, weights: Sequence[float] | None, unit: str | None) -> str:
    """Sets and their weights, for messages."""
    if not names or not weights:
        return "no weights"
    return ", ".join(f"{name}:{weight:g}" for name, weight in zip(names, weights, strict=True)) + f" by {unit}"
