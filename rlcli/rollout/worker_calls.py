"""The calls of the rollout scheduler on workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from rlcli.cluster.dispatch import dispatch
from rlcli.cluster.worker_group import WorkerGroup

if TYPE_CHECKING:
    from ray import ObjectRef

    from rlcli.data.messages import Progress, PromptTask, RolloutBatch
    from rlcli.data.sample_shard import SampleShard
    from rlcli.rollout.rollout_arguments import RolloutArguments
    from rlcli.rollout.worker.work_queue import RoundTasks


class RolloutCalls(Protocol):
    """Methods with which a group of workers generates. References are returned in lists: Ray would pass their
    values."""

    @dispatch(send="scatter", collect="stream", shared=["queue"])
    def rollout(
        self, tasks: Sequence[PromptTask], arguments: RolloutArguments, queue: RoundTasks | None = None
    ) -> Iterator[Progress | RolloutBatch]:
        """Generate and verify; yields Progress regularly, and the report last. queue: further tasks, shared by all
        engines."""

    @dispatch()
    def rollout_snapshot(self, end: bool) -> RolloutBatch:
        """Report the results so far of the calls of `rollout` with slices; `take_shard` has their tokens. end: discard
        the running requests."""

    @dispatch()
    def take_shard(self) -> list[ObjectRef[SampleShard] | None]:
        """A reference to the SampleShard of the last rollout; None if this worker generated nothing.

        It is not in the rollout's report: Ray may drop the count of a reference within a generator's output before the
        receiver is registered, and then a `get` waits indefinitely (ray-project/ray#58080).
        """


RolloutWorkers = WorkerGroup[RolloutCalls]
"""The workers that generate: all of them, or those that host the engines."""
