"""Several datasets in one run: choose the set of each prompt by weight, with one exactly resumable cursor per set.

Without weights they are one dataset, concatenated. With weights w each draw goes to the set whose share is furthest
behind: the one with the least (a + c/2) / w, the first in case of a tie. By prompts, a is how many were drawn from the
set, and c = 1. By tokens, a is how many tokens its groups have had so far (prompt and response of every sample), plus
c, the mean of its groups, for each group that was drawn and is not finished; until one is, c is the mean of all sets'
groups, or 1. So the shares of every step, and of any number of steps, are the weights to within about one group of each
set (Webster's method), and only the order within a set is random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from rlcli.config.schema import RunConfig
from rlcli.data.prompts.cursor import RESUME, CursorState, MixedState, PromptCursor, shown
from rlcli.data.prompts.prompt_selection import REST_STEPS, SelectingCursor
from rlcli.data.prompts.prompt_table import JoinedPrompts
from rlcli.errors import DataError
from rlcli.types import Prompt

Unit = Literal["prompts", "tokens"]
OneSet = PromptCursor | SelectingCursor


class MixedCursor:
    """Indexes of prompts of several sets, in proportions that follow their weights.

    starts: offset of each set, and the total: `[sets + 1]`. An index counts over all sets. of_set: builds the cursor of
    a set from its size, its seed and its share of the prompts; None: `PromptCursor`.

    >>> cursor = MixedCursor(["a", "b"], [0, 4, 8], [2.0, 1.0], seed=0, shuffle=False)
    >>> cursor.take(7)
    [0, 4, 1, 2, 5, 3, 0]
    """

    def __init__(
        self,
        names: Sequence[str],
        starts: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int,
        shuffle: bool,
        unit: Unit = "prompts",
        of_set: Callable[[int, int, float], OneSet] | None = None,
    ) -> None:
        assert len(names) == len(weights) == len(starts) - 1, "one weight and one name per set"
        self.names, self.starts, self.weights, self.unit = list(names), list(starts), list(weights), unit
        sizes = [end - start for start, end in zip(self.starts, self.starts[1:], strict=False)]
        of_set = of_set or (lambda size, seed, share: PromptCursor(size, seed, shuffle))
        self.cursors: list[OneSet] = [
            of_set(size, _seed(seed, set_index), share)
            for set_index, (size, share) in enumerate(zip(sizes, shares(self.weights), strict=True))
        ]
        self.drawn, self.finished, self.tokens = ([0] * len(sizes) for _ in range(3))

    @property
    def count(self) -> int:
        """Number of prompts of all sets."""
        return self.starts[-1]

    @property
    def draws_without_repeat(self) -> int:
        """Minimum over the sets."""
        return min(cursor.draws_without_repeat for cursor in self.cursors)

    def take(self, n: int) -> list[int]:
        """The next `n` indexes."""
        sets = []
        for _ in range(n):
            sets.append(min(range(len(self.weights)), key=self._behind))
            self.drawn[sets[-1]] += 1
        indexes = {set_index: iter(self.cursors[set_index].take(sets.count(set_index))) for set_index in set(sets)}
        return [self.starts[set_index] + next(indexes[set_index]) for set_index in sets]

    def record_group(self, index: int, tokens: int, correct: int = 0, scored: int = 0) -> None:
        """Record a finished group of prompt `index`: its samples had this many tokens, including those of the prompt,
        and `correct` of its `scored` samples are correct."""
        set_index = int(np.searchsorted(self.starts, index, side="right")) - 1
        self.finished[set_index] += 1
        self.tokens[set_index] += tokens
        self.cursors[set_index].record_group(index - self.starts[set_index], tokens, correct, scored)

    def metrics(self) -> dict[str, float]:
        """Metrics of the step, averaged over the sets by their size."""
        means: dict[str, float] = {}
        for cursor in self.cursors:
            for name, value in cursor.metrics().items():
                means[name] = means.get(name, 0.0) + value * cursor.count / self.count
        return means

    def state(self) -> MixedState:
        """The state that `restored` needs to continue exactly from here."""
        return {
            "sets": self.names,
            "weights": self.weights,
            "unit": self.unit,
            "cursors": [cursor.state() for cursor in self.cursors],
            "drawn": list(self.drawn),
            "finished": list(self.finished),
            "tokens": list(self.tokens),
        }

    def restored(self, state: CursorState) -> MixedCursor:
        """The cursor with the state `state`, over these sets. Raises `DataError` if the sets have changed."""
        current = (self.names, self.weights, self.unit)
        saved = (state["sets"], state["weights"], state["unit"]) if "sets" in state else (None, None, None)
        if "sets" not in state or saved != current:
            raise DataError(f"data: the run began with {shown(*saved)} and now has {shown(*current)}", RESUME)
        mixed = MixedCursor(self.names, self.starts, self.weights, seed=0, shuffle=False, unit=self.unit)
        mixed.cursors = [
            cursor.restored(own_state) for own_state, cursor in zip(state["cursors"], self.cursors, strict=True)
        ]
        mixed.drawn, mixed.finished = list(state["drawn"]), list(state["finished"])
        mixed.tokens = list(state["tokens"])
        return mixed

    def _behind(self, set_index: int) -> float:
        """(a + c/2) / w of a set (see the module's docstring): the set with the least is chosen next."""
        if self.unit == "prompts":
            return (self.drawn[set_index] + 0.5) / self.weights[set_index]
        groups = self.finished[set_index] or sum(self.finished)
        tokens = self.tokens[set_index] if self.finished[set_index] else sum(self.tokens)
        mean = tokens / groups if groups else 1.0
        unfinished = self.drawn[set_index] - self.finished[set_index]
        return (self.tokens[set_index] + (unfinished + 0.5) * mean) / self.weights[set_index]


Cursor = PromptCursor | SelectingCursor | MixedCursor


def build_cursor(prompts: Sequence[Prompt], config: RunConfig) -> Cursor:
    """Build the cursor that the config selects: by weight if the sets have weights, else over one dataset."""
    data, seed = config.data, config.train.seed
    selects = data.sampling != "uniform" or data.retire > 0

    def of_set(size: int, seed: int, share: float) -> OneSet:
        if not selects:
            return PromptCursor(size, seed, data.shuffle)
        rest = math.ceil(REST_STEPS * config.rollout.prompts_per_step * share)
        return SelectingCursor(size, seed, data.shuffle, rule=data.sampling, retire=data.retire, rest=rest)

    if isinstance(prompts, JoinedPrompts) and data.weights:
        starts = prompts.starts.tolist()
        return MixedCursor(
            prompts.names, starts, data.weights, seed=seed, shuffle=data.shuffle, unit=data.mix, of_set=of_set
        )
    return of_set(len(prompts), seed, 1.0)


def shares(weights: Sequence[float]) -> list[float]:
    """Normalize the weights to a sum of 1.

    >>> shares([2.0, 1.0, 1.0])
    [0.5, 0.25, 0.25]
    """
    return [weight / sum(weights) for weight in weights]


def _seed(seed: int, set_index: int) -> int:
    """Separate seed for each set: otherwise sets of one size would use the same order."""
    return int(np.random.SeedSequence([seed, set_index]).generate_state(1)[0])
