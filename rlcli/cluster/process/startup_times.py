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


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Let Python's garbage collector run rarely in the block, in which libraries are imported, and never visit what
    exists at its end: torch, transformers and vLLM make a million objects that stay. By default a fifth of the time of
    their imports goes into visiting these, and each full collection later takes a second."""
    before = gc.get_threshold()
    gc.set_threshold(*FEW_COLLECTIONS)
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*before)
