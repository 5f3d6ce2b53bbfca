"""What the scheduler of generation may call on workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from rlcli.cluster.dispatch import dispatch
from rlcli.cluster.worker_group import WorkerGroup

if TYPE_CHECKING:
    from ray import ObjectRef

    from rlcli.data.messages import Progress, PromptTask, RolloutBatch
    from rlcli.data.sample_shard import SampleShard
    from rlcli.rollout.rollout_call import RolloutCall
    from rlcli.rollout.worker.work_queue import Queue


class RolloutCalls(Protocol):
    """The methods by which a group of workers generates. A reference comes in a list, or Ray would pass its value."""

    @dispatch(send="scatter", collect="stream", shared=["queue"])
    def rollout(
        self, tasks: Sequence[PromptTask], call: RolloutCall, queue: Queue | None = None
    ) -> Iterator[Progress | RolloutBatch]:
        """Generate and verify; yields Progress now and then, and what there is last. queue: further tasks, of all
        engines."""

    @dispatch()
    def interrupted_rollout(self, end: bool) -> RolloutBatch:
        """What the calls of `rollout` with slices have so far; its tokens by `take_shard`. end: they do not go on."""

    @dispatch()
    def take_shard(self) -> list[ObjectRef[SampleShard] | None]:
        """A reference to the SampleShard of the last rollout; None if this worker generated nothing.

        It is not in the rollout's report: Ray may drop the count of a reference within a generator's output before the
        receiver is registered, and then a `get` waits indefinitely (ray-project/ray#58080).
        """


RolloutWorkers = WorkerGroup[RolloutCalls]
"""A group of workers, as the scheduler knows them: all of them, or those that host the engines."""
