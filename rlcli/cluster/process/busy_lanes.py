"""Records when this process runs which of its methods: the lanes of a run's timeline.

Every outermost call is measured by two readings of the clock, and kept until the controller collects it once a step.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator

from rlcli.cluster.process.peak_memory import PHASES

Span = tuple[str, float, float]
"""Name, begin and end, in seconds since 1970 by this machine's clock."""
MOST_SPANS = 1024
"""Spans kept between two collections: the newest."""
SHORTEST_S = 0.001
"""Shorter calls are left out."""


class _Lane:
    """The spans of one process. name, since: of the current call."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self.name, self.since = "", 0.0

    def begin(self, name: str) -> None:
        self.name, self.since = name, time.time()

    def end(self) -> None:
        name, self.name, now = self.name, "", time.time()
        if now - self.since >= SHORTEST_S:
            self.spans.append((name, self.since, now))


_lane = _Lane()
_thread = threading.local()


@contextlib.contextmanager
def busy(method: str) -> Iterator[None]:
    """Record the block as a method's call, named as its phase in a step if it has one. A nested call counts to the
    outer one."""
    if _lane.name:
        yield
        return
    _lane.begin(PHASES.get(method, method))
    _thread.calls = True
    try:
        yield
    finally:
        _thread.calls = False
        _lane.end()


def rename_current(name: str) -> None:
    """Record the rest of the current call as `name`. No effect outside a call, and in other threads."""
    if getattr(_thread, "calls", False):
        _lane.end()
        _lane.begin(name)


def collect() -> list[Span]:
    """The finished calls since the last collection, in order."""
    spans = list(_lane.spans)
    _lane.spans.clear()
    return spans
