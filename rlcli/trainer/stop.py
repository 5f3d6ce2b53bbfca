"""Ctrl-C and SIGTERM: once, to finish the step and leave; twice, to leave at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType


class StopOnSignal:
    """While entered, the first SIGINT or SIGTERM sets `requested` if the run is `armed` (it has a step to finish) and
    raises KeyboardInterrupt if not; the second always raises. `on_request` tells the user."""

    def __init__(self, on_request: Callable[[], None]) -> None:
        self.requested = False
        self.armed = False
        self._on_request = on_request
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopOnSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self.armed:
            raise KeyboardInterrupt
        self.requested = True
        self._on_request()


class ignoring_signals:
    """Cleaning up must not be cut short by an impatient third Ctrl-C."""

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
