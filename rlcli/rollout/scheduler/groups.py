"""Groups of samples between rollout and step: as one batch, and as plain values in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from rlcli.data.columns import RAGGED, RENAMED, SampleTable
from rlcli.data.messages import PartialRollout, PromptTask, RolloutBatch, ShardRef
from rlcli.data.prompts.dataset_mixture import Cursor
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.rollout.rollout_call import GREEDY
from rlcli.types import Outcome, Sample, Verdict

NONE = SampleTable.of([])
UNKNOWN = -1


class Source(Protocol):
    """Returns the samples of each step."""

    prompts: TokenizedPrompts
    """Rows of the dataset."""
    cursor: Cursor
    """Order of the prompts; with `state`, all state between steps."""

    @property
    def begun(self) -> bool:
        """Whether samples of the next step have been generated."""
        ...

    def take(self, step: int) -> RolloutBatch:
        """The verified samples of step `step`. `Sample.prompt` counts the groups from 0 without gaps."""
        ...

    def ahead(self, step: int, is_over: Callable[[], bool]) -> None:
        """While step `step` is trained on, generate for the steps after it. is_over: whether the engines are needed."""
        ...

    def state(self) -> tuple[dict[str, Any], list[ShardRef]]:
        """For `restore`: plain values, and references to shards of tokens."""
        ...

    def restore(self, state: Mapping[str, Any], shards: Sequence[ShardRef]) -> None:
        """Continue from the result of `state`."""
        ...

    def drop(self) -> None:
        """Discard what was generated for later steps."""
        ...


class GroupState(Enum):
    """Where a group is between the data cursor and the step that trains on it: see `GroupBuffer`."""

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
    samples: SampleTable = NONE
    """Its verified samples so far, ordered by `Sample.sample`."""
    shards: Sequence[ShardRef] = ()
    """References to their tokens, indexed by `Sample.shard` and `PartialRollout.shard`."""
    partial: Sequence[PartialRollout] = ()
    """Responses that were aborted and will be resumed; other missing ones were not started."""
    baseline: Verdict | None = None
    """Verdict on the greedy response, if there is one."""
    source: str = ""
    """Name of its dataset, in runs with several."""
    data_source: str = ""
    """`data_source` of its row."""
    prompt_id: str = ""
    """Id of its prompt; empty in older checkpoints."""
    number: int = UNKNOWN
    """Number by which the engines know it: its position in a round, or in a streaming run; UNKNOWN before the first."""
    engine: int = UNKNOWN
    """Of a streaming run: index of the engine that generates it."""

    @property
    def is_complete(self) -> bool:
        """Whether it waits for a step, with all its samples."""
        return self.state is GroupState.COMPLETE

    @property
    def aborted(self) -> set[int]:
        """Samples that were aborted."""
        return {one.sample for one in self.partial}

    def add(
        self,
        samples: SampleTable,
        partial: Sequence[PartialRollout],
        shards: Sequence[ShardRef],
        baseline: Verdict | None,
    ) -> None:
        """Add what a round generated. One of `shards`, as samples and partial index them, holds all that is new: one
        worker generates a whole group."""
        used = {*samples.shard.tolist(), *(one.shard for one in partial)}
        assert len(used) <= 1, "one worker generates a whole group"
        new = {one.sample for one in partial} | set(samples.sample.tolist()) | ({GREEDY} if baseline else set())
        last = len(self.shards)
        kept = [one for one in self.partial if one.sample not in new] + [replace(one, shard=last) for one in partial]
        joined = replace(samples, shard=samples.shard * 0 + last)
        if len(self.samples):
            joined = SampleTable.joined([self.samples, joined])
            joined = joined.take(joined.sample.argsort())  # not by prompt: each round renumbers prompts
        all_shards = [*self.shards, *(shards[shard] for shard in used)]
        needed = sorted({*joined.shard.tolist(), *(one.shard for one in kept)})
        renumbered = {shard: number for number, shard in enumerate(needed)}
        self.samples = replace(joined, shard=_renumbered(joined.shard, renumbered))
        self.shards = [all_shards[shard] for shard in needed]
        self.baseline = baseline or self.baseline
        self.partial = [replace(one, shard=renumbered[one.shard]) for one in kept]


def task_of(group: Group, prompts: TokenizedPrompts, samples: int, greedy: bool) -> PromptTask:
    """What is missing of a group, to be generated under the group's number. samples: of a complete group. greedy:
    whether it has a baseline."""
    there = set(group.samples.sample.tolist())
    return PromptTask(
        group.number,
        prompts.tokens(group.prompt_index),
        prompts.prompts[group.prompt_index],
        samples,
        group.first_sample,
        greedy and group.baseline is None,
        tuple(index for index in range(samples) if index not in there) if there else None,
        group.step,
        {one.sample: one for one in group.partial},
        group.shards,
    )


def batch_of(groups: Sequence[Group]) -> RolloutBatch:
    """The groups as one batch: prompts and shards renumbered, each shard's reference once."""
    shards, numbers = _joined_shards(groups)
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


def by_prompt(samples: SampleTable) -> list[SampleTable]:
    """The samples of each prompt that has any. `samples` must be ordered by prompt."""
    starts = np.flatnonzero(np.diff(samples.prompt, prepend=-1)).tolist()
    return [samples[start:end] for start, end in pairwise([*starts, len(samples)])]


def as_plain(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], list[ShardRef]]:
    """Groups as JSON values with numbered shards, and the references to those shards. `open` is what is known of a
    group that is not complete."""
    batch = batch_of(groups)
    shards, renumbered = _joined_shards(groups)
    plain: list[dict[str, Any]] = []
    for position, (group, numbers) in enumerate(zip(groups, renumbered, strict=True)):
        partial = [{**asdict(rollout), "shard": numbers[rollout.shard]} for rollout in group.partial]
        known = {"index": group.prompt_index, "first_sample": group.first_sample, "begun": partial}
        plain.append(
            {
                "step": group.step,
                "baseline": group.baseline and asdict(group.baseline),
                "samples": [asdict(s) for s in batch.samples.take(batch.samples.prompt == position)],
                "open": None if group.is_complete else known,
                "source": group.source,
                "data_source": group.data_source,
                "prompt_id": group.prompt_id,
                "number": group.number,
                "engine": group.engine,
            }
        )
    return plain, shards


def as_groups(plain: Sequence[Mapping[str, Any]], shards: Sequence[ShardRef]) -> list[Group]:
    """The inverse of `as_plain`. Groups that are not complete are queued: no engine has them."""

    def verdict(fields: Mapping[str, Any]) -> Verdict:
        return Verdict(**{**fields, "outcome": Outcome(fields["outcome"])})

    def sample(fields: Mapping[str, Any]) -> Sample:
        known = {RENAMED.get(name, name): value for name, value in fields.items()}
        known |= {name: tuple(known[name]) for name in RAGGED if name in known}
        return Sample(**{**known, "verdict": verdict(fields["verdict"])})

    groups = []
    for group in plain:
        samples = [sample(fields) for fields in group["samples"]]
        known = group.get("open") or {}  # older checkpoints have complete groups alone
        partial = [PartialRollout(**fields) for fields in known.get("begun", ())]
        used = sorted({*(s.shard for s in samples), *(one.shard for one in partial)})
        place = {shard: number for number, shard in enumerate(used)}
        groups.append(
            Group(
                group["step"],
                known.get("index", UNKNOWN),
                known.get("first_sample", 0),
                GroupState.QUEUED if known else GroupState.COMPLETE,
                SampleTable.of(replace(s, shard=place[s.shard]) for s in samples),
                [shards[shard] for shard in used],
                [replace(one, shard=place[one.shard]) for one in partial],
                verdict(group["baseline"]) if group["baseline"] else None,
                group.get("source", ""),
                group.get("data_source", ""),
                group.get("prompt_id", ""),
                group.get("number", UNKNOWN),
                group.get("engine", UNKNOWN),
            )
        )
    return groups


def _joined_shards(groups: Sequence[Group]) -> tuple[list[ShardRef], list[dict[int, int]]]:
    """The references of all groups, each once, and for each group: its number of a shard → the index among them."""
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


def _renumbered(column: np.ndarray, numbers: Mapping[int, int]) -> np.ndarray:
    """A column of shards, each with its new number."""
    if len(numbers) == 1:  # the usual case
        renumbered: np.ndarray = np.full(len(column), next(iter(numbers.values())), np.int64)
    else:
        renumbered = np.array([numbers[shard] for shard in column.tolist()], np.int64)
    return renumbered
