"""Queued verifications."""

from __future__ import annotations

import contextlib
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from rlcli.scoring.expression import Composition
from rlcli.scoring.service.sources import Source
from rlcli.types import Verdict


@dataclass(frozen=True, slots=True)
class Job:
    source: Source
    response: bytes
    future: Future[Verdict] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Line:
    """The requests that wait for one expression. key: its id in scoring processes."""

    composition: Composition
    key: str
    jobs: deque[Job] = field(default_factory=deque)

    def take(self, most: int) -> list[Job]:
        """Take the first jobs, at most `most`. Callable from any thread."""
        taken: list[Job] = []
        with contextlib.suppress(IndexError):
            while len(taken) < most:
                taken.append(self.jobs.popleft())
        return taken
