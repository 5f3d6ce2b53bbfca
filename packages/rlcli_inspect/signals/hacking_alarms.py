"""Listener that reports signals of reward hacking: warnings during the run, and one line at its end."""

from __future__ import annotations

from collections.abc import Mapping

from rlcli.training.listener import ListenedRun, Listener
from rlcli_inspect.signals.monitor import PREFIX, Monitor


class HackingAlarms(Listener):
    """Reports the warnings of a `Monitor`. Inactive in a run whose responses come from the dataset."""

    def __init__(self, run: ListenedRun) -> None:
        self.run = run
        self.monitor: Monitor | None = None

    def begin(self, done: int) -> None:
        """Start, or restart, after step `done`: signals of later steps are dropped."""
        self.close()
        if not self.run.config.data.response:
            self.monitor = Monitor(self.run.path, self.run.config.train.steps, done)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Process the metrics of an evaluation as those of a step."""
        self.step(step, metrics)

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        """Report the signals that were detected since the last step; does not wait."""
        if self.monitor:
            self.monitor.step(number, metrics)
            self._report(number)

    def finish(self, number: int) -> None:
        """Report the result at the end of the run, after step `number`."""
        if self.monitor:
            result = self.monitor.finish()
            self._report(number)
            where = "" if result == "none" else f"; rlcli runs signals {self.run.path} explains them, with examples"
            self.run.note(f"signals of reward hacking: {result}{where}")

    def close(self) -> None:
        """Stop the thread without waiting for it."""
        if self.monitor:
            self.monitor.close()

    def _report(self, number: int) -> None:
        for signal in self.monitor.take() if self.monitor else ():
            value = "" if signal.value is None else f" ({signal.value:.2f}, threshold {signal.threshold:g})"
            self.run.warn(
                f"warning {PREFIX}{signal.name}: {signal.title}{value}; see rlcli runs signals {self.run.path}", number
            )
            self.run.event("warning", step=number, name=PREFIX + signal.name, text=f"{signal.title}{value}")
