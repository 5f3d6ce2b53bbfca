"""A stop for what would take minutes if it took quadratic time."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cpu_limit(seconds: int = 60) -> Iterator[None]:
    """Raise AssertionError in the block after so many seconds of this process's CPU time: far more than a block that
    works takes on any machine. Only in the main thread."""

    def late(*_: object) -> None:
        raise AssertionError(f"not done after {seconds} s of CPU time")

    previous_handler = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous_handler)
