"""Times of the start of a run in this process, until the first token is sampled."""

from __future__ import annotations

import time

from rlcli.cluster.process import process_time

_moments: dict[str, float] = {}
_steps = 0


def done(what: str) -> None:
    """Record the first time that `what` is done."""
    _moments.setdefault(what, time.time())


def engine_step() -> None:
    """Called before each engine step of a generation: the second one follows the first token."""
    global _steps
    _steps += 1
    if _steps == 2:
        done("first token")


def moments() -> dict[str, float]:
    """Event → its time, in seconds since 1970."""
    import psutil

    return {"process": process_time.started_at(psutil.Process()), **_moments}
