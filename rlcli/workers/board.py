"""Who generates what within a round, where that hangs on how fast the engines are.

Each engine is dealt what fits its slots. What is left lies in a queue that all of them see, and whoever has room takes
the next group from it, whole: its samples share their prompt's cache. Where a round is to end before all of it is
finished, each says how many groups it has finished, and the one that finishes the last that is wanted ends it for all.

All that is shared are two counters in the key-value store of the engines' process group, which lives in rank 0 and
takes some 15 µs a call on one machine. So there is no process to start, to wait for, or to lose.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlcli.workers.work import PromptTask

LOOK_EVERY_S = 0.02
"""Between two looks at whether others have ended the round: how long an engine may generate in vain."""


@dataclass(frozen=True)
class Queue:
    """What the engines of one round share. name: like no other round's. tasks: that nobody was dealt, in the order in
    which they are to be begun. until: so many whole groups end the round, whoever finished them; None: all of them."""

    name: str
    tasks: Sequence[PromptTask]
    until: int | None


class Counters(Protocol):
    """What `torch.distributed.Store` has."""

    def add(self, key: str, amount: int) -> int:
        """The counter's new value; it begins at 0."""
        ...


class OwnCounters:
    """Of an engine that is alone."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}

    def add(self, key: str, amount: int) -> int:
        self._values[key] = self._values.get(key, 0) + amount
        return self._values[key]


@dataclass(frozen=True)
class Turn:
    """What an engine is to do next. take: places in the queue. stop: the round is over, break off what is unfinished.
    done: nothing more will come to this engine."""

    take: tuple[int, ...] = ()
    stop: bool = False
    done: bool = False


class Board:
    """One engine's view of a round.

    turn = board.exchange(finished=2, room=13)      # 2 groups more are verified; 13 slots are free
    begin(queue.tasks[place] for place in turn.take)
    """

    def __init__(self, queue: Queue, counters: Counters) -> None:
        self._queue, self._counters = queue, counters
        self._taken, self._finished = f"{queue.name}/taken", f"{queue.name}/finished"
        self._empty = not queue.tasks
        self._looked = 0.0

    def exchange(self, finished: int, room: int) -> Turn:
        """Say how many groups were finished since the last time, and hear what to do. room: slots that are free; groups
        are taken until no slot is, so the last may have to wait for some of its own."""
        if self._over(finished):
            return Turn(stop=True, done=True)
        take = []
        while room > 0 and not self._empty:
            place = self._counters.add(self._taken, 1) - 1
            self._empty = place >= len(self._queue.tasks)
            if not self._empty:
                take.append(place)
                room -= self._queue.tasks[place].responses
        return Turn(tuple(take), done=self._empty and not take)

    def _over(self, finished: int) -> bool:
        now = time.monotonic()
        if self._queue.until is None or (not finished and now - self._looked < LOOK_EVERY_S):
            return False
        self._looked = now
        return self._counters.add(self._finished, finished) >= self._queue.until


def counters() -> Counters:
    """What the engines of this process's group count with."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return OwnCounters()
    # The group's own store: it is there, on the network that the ranks have in common.
    store: Counters = dist.PrefixStore("rlcli/board", dist.distributed_c10d._get_default_store())
    return store
