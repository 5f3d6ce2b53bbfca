"""Monitors a run's saved samples for reward hacking in a thread while it trains."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcli.runs.folder import events_of
from rlcli.runs.record_files import metrics_of
from rlcli_inspect.signals.panel import signals_of
from rlcli_inspect.signals.sample_record import Record
from rlcli_inspect.signals.sample_rows import MAX_STEPS, read_step, sampled_rows
from rlcli_inspect.signals.signal import Signal, summary

PREFIX = "hacking_"
"""Prefix of the names of these warnings in events.jsonl."""
REPEATS = 2
"""Consecutive checks in which a signal must warn before it is reported."""
PAUSE = 20.0
"""Pause after reading, as a multiple of the time of reading: the thread takes at most 5% of one core."""
CHECKS = 4 * MAX_STEPS
"""Maximum number of steps of a run that are read."""
LAST_S = 20.0
"""Maximum seconds that the end of a run waits for the last steps to be read."""
NEEDED = ("step", "reward/mean", "outcome/no_answer", "update/kl")
"""Metrics that signals need, in addition to those of evaluations and of parts of the reward."""


class Monitor:
    """The controller passes each step's metrics (`step`) and gets the warnings (`take`) without waiting. One thread
    reads the samples; if it fails, the signals end, and the run continues.

    run: the run's folder. steps: number of steps of the run. done: completed steps, whose samples are read again.
    """

    def __init__(self, run: Path, steps: int, done: int = 0) -> None:
        self.run, self.every = run, max(1, math.ceil(steps / CHECKS))
        self.failure = ""
        self._reported = {str(event.get("name")) for event in events_of(run) if event.get("event") == "warning"}
        self._consecutive: dict[str, int] = {}
        self._queued: list[dict[str, Any]] = []
        self._alarms: list[Signal] = []
        self._last: list[Signal] = []
        self._lock = threading.Lock()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._guarded, args=(done,), name="signals", daemon=True)
        self._thread.start()

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        """Add a completed step, whose samples are saved."""
        line = {name: value for name, value in metrics.items() if _is_needed(name)} | {"step": number}
        with self._lock:
            self._queued.append(line)
        self._wake.set()

    def take(self) -> list[Signal]:
        """The new warnings: each signal once a run."""
        with self._lock:
            alarms, self._alarms = self._alarms, []
        return alarms

    def finish(self) -> str:
        """Read the last steps, and return one line for the end of the run."""
        self.close()
        self._thread.join(LAST_S)
        if self._thread.is_alive():
            return "not computed: the samples take too long to read; see rlcli runs signals"
        return f"not computed: {self.failure}" if self.failure else summary(self._last)

    def close(self) -> None:
        """Stop the thread after it has read the queued steps; does not wait for it."""
        self._closing.set()
        self._wake.set()

    def _guarded(self, done: int) -> None:
        try:
            self._watch(done)
        except Exception as error:  # a broken file or an odd text must not end the run
            self.failure = f"{type(error).__name__}: {error}"

    def _watch(self, done: int) -> None:
        record = Record()
        lines = [line for line in metrics_of(self.run) if line["step"] <= done]
        for number, rows in sampled_rows(self.run, done):
            record.add(number, rows)
        while True:
            self._wake.wait()
            self._wake.clear()
            closing = self._closing.is_set()
            with self._lock:
                new, self._queued = self._queued, []
            started = time.monotonic()
            lines += new
            to_read = [line["step"] for line in new if line["step"] and line["step"] % self.every == 0]
            for number in to_read[-3:]:  # if reading is slower than training, steps are skipped
                if rows := read_step(self.run / "samples", number):
                    record.add(number, rows)
            if to_read or closing:
                self._check(signals_of(lines, record))
            if closing:
                return
            self._closing.wait(PAUSE * (time.monotonic() - started))

    def _check(self, signals: list[Signal]) -> None:
        for signal in signals:
            count = self._consecutive.get(signal.name, 0) + 1 if signal.state == "warning" else 0
            self._consecutive[signal.name] = count
            if count >= REPEATS and PREFIX + signal.name not in self._reported:
                self._reported.add(PREFIX + signal.name)
                with self._lock:
                    self._alarms.append(signal)
        self._last = signals


def _is_needed(name: str) -> bool:
    return name in NEEDED or name.startswith(("reward/part/", "eval/pass@1", "eval/mean@1"))
