"""Batches of supervised training: responses from the dataset instead of sampled ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlcli.data.columns import SampleTable
from rlcli.data.messages import RolloutBatch, ShardRef
from rlcli.data.prompts.dataset_mixture import Cursor
from rlcli.data.prompts.prompt_table import dataset_name
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.data.sample_shard import ShardBuilder
from rlcli.data.trajectories import Trajectory
from rlcli.rollout.scheduler.group_checkpoint import SourceState
from rlcli.types import Outcome, Sample, Verdict

IMITATED = Verdict(score=1.0, outcome=Outcome.OK, detail="given by the dataset")


class SupervisedSource:
    """Batches of the dataset's responses, in the form of `collect`: one sample per prompt, each correct by
    definition."""

    has_started = False

    def __init__(self, prompts: TokenizedPrompts, cursor: Cursor, prompts_per_step: int) -> None:
        assert cursor.count == len(prompts), "the cursor is over other prompts"
        self.prompts = prompts
        """Tokenized prompts with their responses."""
        self.cursor = cursor
        """Order of the prompts; the caller saves it in checkpoints."""
        self.prompts_per_step = prompts_per_step
        """P, samples of a step."""

    def take(self, step: int) -> RolloutBatch:
        """The samples of step `step`, determined by the cursor's order alone.

        Their tokens are in one shard in Ray's object store. No engine generated them: the shard's log-probs are zeros
        and must not be compared with the policy's, and generation and verification took no time.
        """
        import ray

        builder, samples, sources, data_sources = ShardBuilder(), [], [], []
        for position, index in enumerate(self.cursor.take(self.prompts_per_step)):
            prompt, response = self.prompts.tokens(index), self.prompts.responses(index)
            self.cursor.record_group(index, len(prompt) + len(response))
            sources.append(dataset_name(self.prompts.prompts, index))
            data_sources.append(self.prompts.prompts[index].data_source)
            samples.append(
                Sample(
                    prompt=position,
                    sample=0,
                    shard=0,
                    row=builder.add(Trajectory.single(prompt, response, np.zeros(len(response), np.float32))),
                    prompt_tokens=len(prompt),
                    response_tokens=len(response),
                    stop_reason="stop",
                    verdict=IMITATED,
                    version=0,
                )
            )
        shards = [ray.put(builder.build())]
        return RolloutBatch(SampleTable.of(samples), shards, sources=sources, data_sources=data_sources)

    def prefetch(self, step: int, should_stop: Callable[[], bool]) -> None:
        """Nothing is generated."""

    def state(self) -> tuple[SourceState, list[ShardRef]]:
        """No group waits."""
        return {"waiting": []}, []

    def restore(self, state: SourceState, shards: Sequence[ShardRef]) -> None:
        """There is no state besides the cursor."""

    def discard(self) -> None:
        """Nothing was generated for later steps."""
