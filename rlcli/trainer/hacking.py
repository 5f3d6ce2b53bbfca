"""Reports signals of reward hacking: alarms while the run trains, and one line at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlcli.signals.monitor import PREFIX, Monitor


class HackingAlarms:
    """The driver's side of `Monitor`.

    run: the run's folder. steps: of the whole run. note: prints a line. warn: prints a warning of a step. event: writes
    an event of this name and these fields. enabled: whether the policy's own responses are rewarded.
    """

    def __init__(
        self,
        run: Path,
        steps: int,
        note: Callable[[str], None],
        warn: Callable[[str, int], None],
        event: Callable[..., Any],
        *,
        enabled: bool,
    ) -> None:
        self.run, self.steps, self.note, self.warn, self.event = run, steps, note, warn, event
        self.enabled = enabled
        self.monitor: Monitor | None = None

    def restart(self, done: int) -> None:
        """Begin after step `done`: what was known of later steps is dropped."""
        self.close()
        self.monitor = Monitor(self.run, self.steps, done) if self.enabled else None

    def step(self, number: int, metrics: Mapping[str, Any]) -> None:
        """A step is done, and its samples are saved. Reports what was found since the last step; does not wait."""
        if self.monitor:
            self.monitor.step(number, metrics)
            self._report(number)

    def finish(self, number: int) -> None:
        """At the end of the run, after step `number`."""
        if self.monitor:
            result = self.monitor.finish()
            self._report(number)
            where = "" if result == "none" else f"; rlcli runs signals {self.run} explains them, with examples"
            self.note(f"signals of reward hacking: {result}{where}")

    def close(self) -> None:
        """End the thread without waiting for it."""
        if self.monitor:
            self.monitor.close()

    def _report(self, number: int) -> None:
        for signal in self.monitor.take() if self.monitor else ():
            value = "" if signal.value is None else f" ({signal.value:.2f}, threshold {signal.threshold:g})"
            self.warn(
                f"warning {PREFIX}{signal.name}: {signal.title}{value}; see rlcli runs signals {self.run}", number
            )
            self.event("warning", step=number, name=PREFIX + signal.name, text=f"{signal.title}{value}")
