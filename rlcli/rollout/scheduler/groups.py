"""Groups of samples between rollout and step: their record, the task that generates one, and the batch of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from rlcli.data.columns import SampleTable
from rlcli.data.messages import PartialRollout, PromptTask, RolloutBatch, ShardRef
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.rollout.rollout_arguments import GREEDY
from rlcli.types import Verdict

if TYPE_CHECKING:
    from jaxtyping import Int

NO_SAMPLES = SampleTable.of([])
UNKNOWN = -1
"""An index or number that a group does not have."""


class GroupState(Enum):
    """State of a group between the data cursor and the step that trains on it: see `GroupBuffer`."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETE = "complete"
    TAKEN = "taken"
    DROPPED = "dropped"


@dataclass(eq=False)
class Group:
    """The samples of one prompt, from the moment that the cursor yields it until a step trains on them.

    >>> group = Group(step=3, prompt_index=7, prompt_id="row:7")
    >>> group.state, len(group.samples), group.is_complete
    (<GroupState.QUEUED: 'queued'>, 0, False)
    """

    step: int
    """Step for which the cursor yielded it: it fixes the seeds of its samples."""
    prompt_index: int = UNKNOWN
    """Row of its prompt in the dataset; UNKNOWN if it was complete in a checkpoint."""
    first_sample: int = 0
    """Offset of its samples' indexes in their seeds: not 0 if the step drew the prompt before."""
    state: GroupState = GroupState.QUEUED
    """Its state in the buffer."""
    samples: SampleTable = NO_SAMPLES
    """Its verified samples so far, ordered by `Sample.sample`."""
    shards: Sequence[ShardRef] = ()
    """References to their tokens, indexed by `Sample.shard` and `PartialRollout.shard`."""
    partial: Sequence[PartialRollout] = ()
    """Aborted responses, which will be resumed; other missing ones were not started."""
    baseline: Verdict | None = None
    """Verdict on the greedy response, if there is one."""
    source: str = ""
    """Name of its dataset, in runs with several."""
    data_source: str = ""
    """`data_source` of its row."""
    prompt_id: str = ""
    """Id of its prompt; empty in older checkpoints."""
    number: int = UNKNOWN
    """Number by which the engines identify it: its index in a round, or in a streaming run; UNKNOWN before the
    first."""
    engine: int = UNKNOWN
    """Index of the engine that generates it, in a streaming run."""

    @property
    def is_complete(self) -> bool:
        """True if it waits for a step, with all its samples."""
        return self.state is GroupState.COMPLETE

    @property
    def aborted(self) -> set[int]:
        """Samples that were aborted."""
        return {rollout.sample for rollout in self.partial}

    def add(
        self,
        samples: SampleTable,
        partial: Sequence[PartialRollout],
        shards: Sequence[ShardRef],
        baseline: Verdict | None,
    ) -> None:
        """Add a round's samples and partial responses. All their tokens are in one of `shards`, which `Sample.shard`
        and `PartialRollout.shard` index: one worker generates a whole group."""
        used = {*samples.shard.tolist(), *(rollout.shard for rollout in partial)}
        assert len(used) <= 1, "one worker generates a whole group"
        new = {rollout.sample for rollout in partial} | set(samples.sample.tolist()) | ({GREEDY} if baseline else set())
        last = len(self.shards)
        pending = [rollout for rollout in self.partial if rollout.sample not in new] + [
            replace(rollout, shard=last) for rollout in partial
        ]
        joined = replace(samples, shard=samples.shard * 0 + last)
        if len(self.samples):
            joined = SampleTable.joined([self.samples, joined])
            joined = joined.take(joined.sample.argsort())  # not by prompt: each round renumbers prompts
        all_shards = [*self.shards, *(shards[shard] for shard in used)]
        needed = sorted({*joined.shard.tolist(), *(rollout.shard for rollout in pending)})
        renumbered = {shard: number for number, shard in enumerate(needed)}
        self.samples = replace(joined, shard=_renumbered(joined.shard, renumbered))
        self.shards = [all_shards[shard] for shard in needed]
        self.baseline = baseline or self.baseline
        self.partial = [replace(rollout, shard=renumbered[rollout.shard]) for rollout in pending]


def generation_task(group: Group, prompts: TokenizedPrompts, samples: int, greedy: bool) -> PromptTask:
    """The task that generates a group's missing samples, under the group's number. samples: G, of a complete group.
    greedy: whether groups have a greedy baseline."""
    verified = set(group.samples.sample.tolist())
    return PromptTask(
        group=group.number,
        tokens=prompts.tokens(group.prompt_index),
        prompt=prompts.prompts[group.prompt_index],
        samples=samples,
        first_sample=group.first_sample,
        greedy=greedy and group.baseline is None,
        wanted=tuple(index for index in range(samples) if index not in verified) if verified else None,
        step=group.step,
        partial={rollout.sample: rollout for rollout in group.partial},
        shards=group.shards,
    )


def merge_groups(groups: Sequence[Group]) -> RolloutBatch:
    """Merge groups into one batch: prompts and shards are renumbered, and each shard's reference occurs once."""
    shards, numbers = join_shards(groups)
    counts = [len(group.samples) for group in groups]
    columns = [_renumbered(group.samples.shard, by_group) for group, by_group in zip(groups, numbers, strict=True)]
    samples = replace(
        SampleTable.joined([group.samples for group in groups]),
        prompt=np.repeat(np.arange(len(groups)), counts),
        shard=np.concatenate(columns) if columns else np.zeros(0, np.int64),
    )
    return RolloutBatch(
        samples,
        shards,
        baselines={position: group.baseline for position, group in enumerate(groups) if group.baseline is not None},
        prompt_ids=[group.prompt_id for group in groups],
        sources=[group.source for group in groups],
        data_sources=[group.data_source for group in groups],
    )


def split_by_prompt(samples: SampleTable) -> list[SampleTable]:
    """Split a table of samples, ordered by prompt, into one table for each prompt."""
    starts = np.flatnonzero(np.diff(samples.prompt, prepend=-1)).tolist()
    return [samples[start:end] for start, end in pairwise([*starts, len(samples)])]


def join_shards(groups: Sequence[Group]) -> tuple[list[ShardRef], list[dict[int, int]]]:
    """References to the shards of all groups, each once, and for each group a map from its shard numbers to indexes
    among these references."""
    shards: list[ShardRef] = []
    index_of: dict[int, int] = {}
    renumbered = []
    for group in groups:
        for shard in group.shards:
            if id(shard) not in index_of:
                index_of[id(shard)] = len(shards)
                shards.append(shard)
        renumbered.append({number: index_of[id(shard)] for number, shard in enumerate(group.shards)})
    return shards, renumbered


def _renumbered(column: Int[np.ndarray, " S"], numbers: Mapping[int, int]) -> Int[np.ndarray, " S"]:
    """Map a column of shard numbers to new numbers."""
    if len(numbers) == 1:  # the usual case
        return np.full(len(column), next(iter(numbers.values())), np.int64)
    return np.array([numbers[shard] for shard in column.tolist()], np.int64)
