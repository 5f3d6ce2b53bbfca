"""Dynamic load balancing across engines within a round.

Each engine is assigned what fits its slots. The remaining groups are in a queue shared by all engines; an engine with
free slots takes the next group from it, whole: its samples share their prompt's cache. If a round is to end early, each
engine reports how many groups it has finished, and the one that finishes the last wanted group ends the round for all.

The only shared state is two counters in the key-value store of the engines' process group, which lives in rank 0 and
takes some 15 µs a call on one machine. So there is no process to start, to wait for, or to lose.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli.data.messages import PromptTask

if TYPE_CHECKING:
    from torch.distributed import Store

LOOK_EVERY_S = 0.02
"""Interval of checks whether others have ended the round, and so the longest useless generation."""


@dataclass(frozen=True)
class Queue:
    """Shared state of the engines in one round. name: unique to the round. tasks: the unassigned ones, in the order in
    which they are started. until: so many complete groups end the round, on any engine; None: all of them."""

    name: str
    tasks: Sequence[PromptTask]
    until: int | None


NO_QUEUE = Queue("", (), None)
"""Of a round in which each engine is assigned all its tasks at once, and finishes them."""


@dataclass(frozen=True)
class WorkGrant:
    """What an engine does next. take: indexes into the queue. stop: the round is over, abort what is unfinished.
    done: nothing more will come to this engine."""

    take: tuple[int, ...] = ()
    stop: bool = False
    done: bool = False


class WorkQueue:
    """One engine's view of a round.

    grant = work_queue.exchange(finished=2, room=13)      # 2 more groups are verified; 13 slots are free
    begin(queue.tasks[place] for place in grant.take)
    """

    def __init__(self, queue: Queue, counters: Store) -> None:
        self._queue, self._counters = queue, counters
        self._taken, self._finished = f"{queue.name}/taken", f"{queue.name}/finished"
        self._empty = not queue.tasks
        self._looked = 0.0

    def exchange(self, finished: int, room: int) -> WorkGrant:
        """Report the groups finished since the last call, and get the next work. room: free slots; groups are taken
        until no slot is free, so some samples of the last one may have to wait."""
        if self._over(finished):
            return WorkGrant(stop=True, done=True)
        take = []
        while room > 0 and not self._empty:
            place = self._counters.add(self._taken, 1) - 1
            self._empty = place >= len(self._queue.tasks)
            if not self._empty:
                take.append(place)
                room -= self._queue.tasks[place].responses
        return WorkGrant(tuple(take), done=self._empty and not take)

    def _over(self, finished: int) -> bool:
        now = time.monotonic()
        if self._queue.until is None or (not finished and now - self._looked < LOOK_EVERY_S):
            return False
        self._looked = now
        return bool(self._counters.add(self._finished, finished) >= self._queue.until)


def counters() -> Store:
    """The counters that the engines of this process's group share."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return dist.HashStore()
    # The group's own store: it exists, on the network that the ranks share.
    return dist.PrefixStore("rlcli/board", dist.distributed_c10d._get_default_store())
