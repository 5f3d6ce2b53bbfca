"""After a run's first steps: one line on how long they take, and whether asynchrony would make them faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcli.config.schema import RunConfig
from rlcli.data.columns import Samples
from rlcli.runs.background import BackgroundWriter

if TYPE_CHECKING:
    from rlcli.planner.asynchrony.pace import Pace
    from rlcli.planner.setting import Setting

Planned = Callable[[], "Setting | None"]
"""The plan of the run, if there is one: asked for when it is needed."""

WARM_UP, STEPS = 3, 20
"""Steps of a process that are not measured, and after how many it reports."""


def by_prompt(prompts: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """Lengths of the samples [samples] by group. prompts: of each sample [samples], in order."""
    starts = np.flatnonzero(np.diff(prompts, prepend=-1))[1:]
    return [group.tolist() for group in np.split(lengths, starts)]


class PaceReport:
    """Measures steps 4 to 20 of this process, and compares them with the plan. What it computes, it does in a thread.

    planned: the plan of the run, or None. note: prints a line. event: writes an event of this name and these fields.
    """

    def __init__(
        self, config: RunConfig, planned: Planned, note: Callable[[str], None], event: Callable[..., Any]
    ) -> None:
        self.config, self.planned, self.note, self.event = config, planned, note, event
        self._seen = 0
        self._lengths: list[tuple[np.ndarray, np.ndarray]] = []  # of each step: prompts and tokens drawn, by sample
        self._metrics: list[Mapping[str, float]] = []
        self._thread = BackgroundWriter("pace")
        self._found: list[tuple[int, Pace]] = []

    def drew(self, samples: Samples) -> None:
        """The samples of a step, ordered by prompt."""
        if WARM_UP <= self._seen < STEPS:
            self._lengths.append((samples.prompt, samples.drawn_tokens))

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        """A step is done. Does not wait."""
        self._seen += 1
        if WARM_UP < self._seen <= STEPS:
            self._metrics.append(metrics)
        if self._seen == STEPS:
            self._thread.put(partial(self._measure, number, self._lengths, self._metrics))
            self._lengths, self._metrics = [], []
        self._report()

    def finish(self) -> None:
        """At the end of the run."""
        self._thread.flush()
        self._report()

    def _measure(
        self, number: int, steps: list[tuple[np.ndarray, np.ndarray]], metrics: list[Mapping[str, float]]
    ) -> None:
        from rlcli.planner.asynchrony.pace import pace_of

        groups = [group for prompts, lengths in steps for group in by_prompt(prompts, lengths)]
        self._found.append((number, pace_of(self.config, groups, metrics, self.planned())))

    def _report(self) -> None:
        while self._found:
            number, pace = self._found.pop()
            self.note(f"after {number} steps: {pace.told}")
            self.event("pace", step=number, **pace.as_dict())
        if problem := self._thread.problem():
            self.note(problem)
