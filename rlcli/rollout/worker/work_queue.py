"""Dynamic load balancing across engines within a round.

Each engine is assigned what fits its slots. The remaining groups are in a queue shared by all engines; an engine with
free slots takes the next group from it, whole: its samples share their prompt's cache. If a round is to end early, each
engine reports how many groups it has finished, and the one that finishes the last required group ends the round.

The only shared state is two counters in the key-value store of the engines' process group, which is in rank 0 and takes
about 15 µs a call on one machine. So no further process has to be started or supervised.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli.data.messages import PromptTask

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_S = 0.02
"""Interval of checks whether other engines have ended the round, and so the longest wasted generation."""


@dataclass(frozen=True)
class RoundTasks:
    """The queue that the engines share in one round."""

    name: str
    """Unique name of the round."""
    tasks: Sequence[PromptTask]
    """Unassigned tasks, in the order in which they are started."""
    until: int | None
    """Number of complete groups, over all engines, that end the round; None: all of them."""


NO_SHARED_TASKS = RoundTasks("", (), None)
"""RoundTasks of a round in which each engine is assigned all its tasks at once, and finishes them."""


@dataclass(frozen=True)
class WorkGrant:
    """The next work of an engine."""

    take: tuple[int, ...] = ()
    """Indexes of tasks in the queue that it starts."""
    stop: bool = False
    """True if the round is over, so that it aborts unfinished requests."""
    done: bool = False
    """True if it will get no more tasks."""


class WorkQueue:
    """One engine's view of a round's queue.

    grant = work_queue.exchange(finished=2, room=13)      # 2 more groups are verified; 13 slots are free
    begin(queue.tasks[index] for index in grant.take)
    """

    def __init__(self, queue: RoundTasks, counters: Store) -> None:
        self._queue, self._counters = queue, counters
        self._taken, self._finished = f"{queue.name}/taken", f"{queue.name}/finished"
        self._empty = not queue.tasks
        self._last_poll = 0.0

    def exchange(self, finished: int, room: int) -> WorkGrant:
        """Report the groups finished since the last call, and get the next work. room: free slots; groups are taken
        until no slot is free, so that some samples of the last group may have to wait."""
        if self._is_over(finished):
            return WorkGrant(stop=True, done=True)
        take = []
        while room > 0 and not self._empty:
            index = self._counters.add(self._taken, 1) - 1
            self._empty = index >= len(self._queue.tasks)
            if not self._empty:
                take.append(index)
                room -= self._queue.tasks[index].responses
        return WorkGrant(tuple(take), done=self._empty and not take)

    def _is_over(self, finished: int) -> bool:
        now = time.monotonic()
        if self._queue.until is None or (not finished and now - self._last_poll < POLL_S):
            return False
        self._last_poll = now
        return self._counters.add(self._finished, finished) >= self._queue.until


def counters() -> Store:
    """The counters that the engines of this process's group share: in the group's own store, which exists already, on
    the network that the ranks share."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore, PrefixStore

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return HashStore()
    return PrefixStore("rlcli/work_queue", dist.distributed_c10d._get_default_store())
