"""After a run's first steps: one line on how long they take, and whether asynchrony would make them faster."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rlcli.data.columns import SampleTable
from rlcli.support.background_writer import BackgroundWriter
from rlcli.training.listener import ListenedRun, Listener

if TYPE_CHECKING:
    from rlcli_planner.asynchrony.pace import Pace

WARM_UP, STEPS = 3, 20
"""Steps of a process that are not measured, and after how many it reports."""


def by_prompt(prompts: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """Lengths of the samples [samples] by group. prompts: of each sample [samples], in order."""
    starts = np.flatnonzero(np.diff(prompts, prepend=-1))[1:]
    return [group.tolist() for group in np.split(lengths, starts)]


class PaceReport(Listener):
    """Measures steps 4 to 20 of this process, and compares them with the plan. It computes in a thread."""

    def __init__(self, run: ListenedRun) -> None:
        self.run = run
        self._seen = 0
        self._lengths: list[tuple[np.ndarray, np.ndarray]] = []  # of each step: prompts and tokens drawn, by sample
        self._metrics: list[Mapping[str, float]] = []
        self._thread = BackgroundWriter("pace")
        self._found: list[tuple[int, Pace]] = []

    def generated(self, samples: SampleTable) -> None:
        """Keep the lengths of a measured step."""
        if WARM_UP <= self._seen < STEPS:
            self._lengths.append((samples.prompt, samples.drawn_tokens))

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        """Count the step, and report once enough are measured. Does not wait."""
        self._seen += 1
        if WARM_UP < self._seen <= STEPS:
            self._metrics.append(metrics)
        if self._seen == STEPS:
            self._thread.put(partial(self._measure, number, self._lengths, self._metrics))
            self._lengths, self._metrics = [], []
        self._report()

    def finish(self, number: int) -> None:
        """Report a measurement that is not reported yet."""
        self._thread.flush()
        self._report()

    def _measure(
        self, number: int, steps: list[tuple[np.ndarray, np.ndarray]], metrics: list[Mapping[str, float]]
    ) -> None:
        from rlcli_planner.asynchrony.pace import pace_of

        groups = [group for prompts, lengths in steps for group in by_prompt(prompts, lengths)]
        self._found.append((number, pace_of(self.run.config, groups, metrics, self.run.plan())))

    def _report(self) -> None:
        while self._found:
            number, pace = self._found.pop()
            self.run.note(f"after {number} steps: {pace.told}")
            self.run.event("pace", step=number, **pace.as_dict())
        if problem := self._thread.problem():
            self.run.note(problem)
