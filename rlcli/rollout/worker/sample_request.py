"""One sample that a worker generates, and what there is of it before."""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.data.messages import PromptTask
from rlcli.data.sample_shard import FETCH_TIMEOUT_S, SampleShard
from rlcli.data.trajectories import Trajectory
from rlcli.rollout.rollout_call import GREEDY


@dataclass(frozen=True)
class SampleRequest:
    """One sample to generate."""

    task: PromptTask
    """Its group."""
    sample: int
    """Index within the group; `GREEDY` for the greedy baseline."""
    seed: int
    """63-bit seed of its first turn (`turn_seed`)."""
    step: int
    """Step for which the group was drawn."""

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most likely one."""
        return self.sample == GREEDY

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier round aborted it."""
        return self.sample in self.task.begun

    def so_far(self) -> Trajectory:
        """What there is of the sample before the engine continues it: its prompt, or a response that was aborted."""
        return started(self.task, self.sample)


def started(task: PromptTask, sample: int) -> Trajectory:
    """What there is of a sample before the engine continues it: its prompt, or a response that was aborted."""
    if sample not in task.begun:
        return Trajectory.of_prompt(task.tokens, task.pictures)
    partial = task.begun[sample]
    shard = task.shards[partial.shard]
    if not isinstance(shard, SampleShard):
        import ray

        shard = ray.get(shard, timeout=FETCH_TIMEOUT_S)
    whole: Trajectory = shard.row(partial.row)
    return whole.dated(partial.version)
