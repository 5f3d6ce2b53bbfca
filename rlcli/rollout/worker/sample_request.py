"""Request for one sample, and the tokens that exist of it before."""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.data.messages import PromptTask
from rlcli.data.sample_shard import FETCH_TIMEOUT_S, SampleShard
from rlcli.data.trajectories import Trajectory
from rlcli.rollout.rollout_arguments import GREEDY


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
        """True if decoding is greedy."""
        return self.sample == GREEDY

    @property
    def is_resumed(self) -> bool:
        """True if an earlier round aborted it."""
        return self.sample in self.task.partial

    def so_far(self) -> Trajectory:
        """Tokens of the sample before the engine continues it: its prompt, with the response if it was aborted."""
        if not self.is_resumed:
            return Trajectory.of_prompt(self.task.tokens, self.task.images)
        partial = self.task.partial[self.sample]
        shard = self.task.shards[partial.shard]
        if not isinstance(shard, SampleShard):
            import ray

            shard = ray.get(shard, timeout=FETCH_TIMEOUT_S)
        trajectory: Trajectory = shard.row(partial.row)
        return trajectory.with_version(partial.version)
