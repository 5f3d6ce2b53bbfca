"""Times of the start of a run in this process, until the first token is sampled."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

from rlcli.cluster.process import process_time

FEW_COLLECTIONS = (200_000, 10, 100)
"""Thresholds of Python's garbage collector while libraries are imported."""

_moments: dict[str, float] = {}
_steps = 0


def done(event: str) -> None:
    """Record the first time of an event."""
    _moments.setdefault(event, time.time())


def engine_step() -> None:
    """Count an engine step. Called before each step of a generation: the second one follows the first token."""
    global _steps
    _steps += 1
    if _steps == 2:
        done("first token")


def moments() -> dict[str, float]:
    """Event → its time, in seconds since 1970."""
    import psutil

    return {"process": process_time.started_at(psutil.Process()), **_moments}


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Run Python's garbage collector rarely in the block, in which libraries are imported, and exclude the objects that
    exist at its end from later collections: torch, transformers and vLLM create a million objects that stay. By default
    a fifth of the time of their imports goes into visiting these, and each full collection later takes a second."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*FEW_COLLECTIONS)
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*thresholds)
