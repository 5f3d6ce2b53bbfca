"""The start of a run: what was done when, in this process, until the first token is sampled."""

from __future__ import annotations

import time

from rlcli.workers import births

_moments: dict[str, float] = {}
_steps = 0


def done(what: str) -> None:
    """`what` is done, for the first time."""
    _moments.setdefault(what, time.time())


def engine_step() -> None:
    """The engine is about to compute a step of a generation: the second one follows the first token."""
    global _steps
    _steps += 1
    if _steps == 2:
        done("first token")


def moments() -> dict[str, float]:
    """What was done → when, in seconds since 1970."""
    import psutil

    return {"process": births.born(psutil.Process()), **_moments}
