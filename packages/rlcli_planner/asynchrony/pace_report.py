"""Listener that reports the pace of a run's first steps, and whether asynchrony would make them faster."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rlcli.data.columns import SampleTable
from rlcli.support.background_writer import BackgroundWriter
from rlcli.training.listener import ListenedRun, Listener

if TYPE_CHECKING:
    from jaxtyping import Int

    from rlcli_planner.asynchrony.pace import Pace

    StepLengths = tuple[Int[np.ndarray, " S"], Int[np.ndarray, " S"]]
    """Prompt index and response tokens of each sample of a step."""

WARM_UP, STEPS = 3, 20
"""Steps of a process before the measured ones, and steps after which it reports."""


def by_prompt(prompts: Int[np.ndarray, " S"], lengths: Int[np.ndarray, " S"]) -> list[list[int]]:
    """Lengths of the samples by group. prompts: prompt index of each sample, sorted."""
    starts = np.flatnonzero(np.diff(prompts, prepend=-1))[1:]
    return [group.tolist() for group in np.split(lengths, starts)]


class PaceReport(Listener):
    """Measures steps 4 to 20 of this process, and compares them with the plan in a thread."""

    def __init__(self, run: ListenedRun) -> None:
        self.run = run
        self._seen = 0
        self._lengths: list[StepLengths] = []
        self._metrics: list[Mapping[str, float]] = []
        self._thread = BackgroundWriter("pace")
        self._measured: list[tuple[int, Pace]] = []

    def generated(self, samples: SampleTable) -> None:
        """Record the lengths of a measured step."""
        if WARM_UP <= self._seen < STEPS:
            self._lengths.append((samples.prompt, samples.response_tokens))

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

    def _measure(self, number: int, steps: list[StepLengths], metrics: list[Mapping[str, float]]) -> None:
        from rlcli_planner.asynchrony.pace import pace_of
        from rlcli_planner.plan_input import RunPlanInput

        groups = [group for prompts, lengths in steps for group in by_prompt(prompts, lengths)]
        plan = self.run.plan()
        assert plan is None or isinstance(plan, RunPlanInput), "the planner's input comes from this package"
        self._measured.append((number, pace_of(self.run.config, groups, metrics, plan)))

    def _report(self) -> None:
        while self._measured:
            number, pace = self._measured.pop()
            self.run.note(f"after {number} steps: {pace.summary}")
            self.run.event("pace", step=number, **pace.as_dict())
        if problem := self._thread.problem():
            self.run.note(problem)
