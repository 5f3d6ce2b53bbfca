"""Handles Ctrl-C, SIGTERM and SIGHUP: the first finishes the step and exits, the second exits at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

REPEAT_S = 0.5
"""Signals within this time count as one: a signal to all processes of a job also comes from the supervisor, which
forwards its own."""


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _may_handle() -> bool:
    """True in the main thread: only that may handle signals; a run in another thread gets none."""
    return threading.current_thread() is threading.main_thread()


class StopOnSignal:
    """Handles SIGINT, SIGTERM and SIGHUP while entered: the first sets `requested` if the run is `armed` (it has a step
    to finish) and raises KeyboardInterrupt if not; the second always raises. `on_request` notifies the user."""

    def __init__(self, on_request: Callable[[], None]) -> None:
        self.requested = False
        self.armed = False
        self._on_request = on_request
        self._last_signal_at = float("-inf")
        self._before: dict[signal.Signals, object] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> StopOnSignal:
        self._terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
        for number in SIGNALS if _may_handle() else ():
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._leave_the_terminal()
        last, self._last_signal_at = self._last_signal_at, time.monotonic()
        if self._last_signal_at - last < REPEAT_S:
            return
        if self.requested or not self.armed:
            raise KeyboardInterrupt
        self.requested = True
        self._on_request()

    def _leave_the_terminal(self) -> None:
        """Redirect output to /dev/null: the terminal is gone, and writing to it would fail the run."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in self._terminals:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)


class ignoring_signals:
    """Ignores signals during cleanup: a third Ctrl-C must not interrupt it."""

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS} if _may_handle() else {}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
