"""The saved form of a scheduler's groups: JSON values in a checkpoint, and references to the shards of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias, TypedDict, cast

from rlcli.data.columns import RAGGED, RENAMED, SampleTable
from rlcli.data.messages import PartialRollout, ShardRef
from rlcli.rollout.scheduler.groups import UNKNOWN, Group, GroupState, join_shards, merge_groups
from rlcli.types import Outcome, Sample, Verdict

Fields: TypeAlias = dict[str, Any]
"""Fields of a record as JSON values, which `asdict` does not type."""


class OpenGroupState(TypedDict, total=False):
    """Plain values of an incomplete group, besides those of every group."""

    index: int
    """As `Group.prompt_index`."""
    first_sample: int
    """As `Group.first_sample`."""
    partial: list[Fields]
    """Fields of each `PartialRollout`."""
    begun: list[Fields]
    """The old name of `partial`, read for one release."""


class SavedGroup(TypedDict, total=False):
    """Plain values of a group in a checkpoint. Older checkpoints lack some."""

    step: int
    """As `Group.step`."""
    baseline: Fields | None
    """Fields of the greedy response's verdict."""
    samples: list[Fields]
    """Fields of each verified `Sample`."""
    open: OpenGroupState | None
    """None if the group is complete."""
    source: str
    """As `Group.source`."""
    data_source: str
    """As `Group.data_source`."""
    prompt_id: str
    """As `Group.prompt_id`."""
    number: int
    """As `Group.number`."""
    engine: int
    """As `Group.engine`."""


class SourceState(TypedDict, total=False):
    """Plain values of a `BatchSource` in a checkpoint. Older checkpoints have only groups."""

    waiting: list[SavedGroup]
    """Groups that no step has taken."""
    rounds: dict[str, object]
    """As `StepTotals.state`."""
    groups: int
    """Groups that streaming rollouts have numbered."""
    ahead: object
    """Samples that were generated ahead, in the form of an earlier version, which is refused."""


def source_state(state: Mapping[str, object]) -> SourceState:
    """The part of a checkpoint's state that belongs to its `BatchSource`."""
    return cast("SourceState", state)  # read from JSON; `Checkpoint.restoring` reports values of other types


def groups_to_json(groups: Sequence[Group]) -> tuple[list[SavedGroup], list[ShardRef]]:
    """Groups as JSON values with numbered shards, and the references to those shards."""
    batch = merge_groups(groups)
    shards, renumbered = join_shards(groups)
    plain: list[SavedGroup] = []
    for position, (group, numbers) in enumerate(zip(groups, renumbered, strict=True)):
        partial = [{**asdict(rollout), "shard": numbers[rollout.shard]} for rollout in group.partial]
        incomplete = OpenGroupState(index=group.prompt_index, first_sample=group.first_sample, partial=partial)
        plain.append(
            {
                "step": group.step,
                "baseline": None if group.baseline is None else asdict(group.baseline),
                "samples": [asdict(s) for s in batch.samples.take(batch.samples.prompt == position)],
                "open": None if group.is_complete else incomplete,
                "source": group.source,
                "data_source": group.data_source,
                "prompt_id": group.prompt_id,
                "number": group.number,
                "engine": group.engine,
            }
        )
    return plain, shards


def groups_from_json(plain: Sequence[SavedGroup], shards: Sequence[ShardRef]) -> list[Group]:
    """The inverse of `groups_to_json`. Incomplete groups are queued: no engine has them."""

    def verdict(fields: Fields) -> Verdict:
        return Verdict(**{**fields, "outcome": Outcome(fields["outcome"])})

    def sample(fields: Fields) -> Sample:
        values = {RENAMED.get(name, name): value for name, value in fields.items()}
        values |= {name: tuple(values[name]) for name in RAGGED if name in values}
        return Sample(**{**values, "verdict": verdict(fields["verdict"])})

    groups = []
    for group in plain:
        samples = [sample(fields) for fields in group["samples"]]
        incomplete = group.get("open") or OpenGroupState()  # older checkpoints have only complete groups
        partial = [PartialRollout(**fields) for fields in incomplete.get("partial", incomplete.get("begun", ()))]
        used = sorted({*(s.shard for s in samples), *(rollout.shard for rollout in partial)})
        renumbered = {shard: number for number, shard in enumerate(used)}
        groups.append(
            Group(
                step=group["step"],
                prompt_index=incomplete.get("index", UNKNOWN),
                first_sample=incomplete.get("first_sample", 0),
                state=GroupState.QUEUED if incomplete else GroupState.COMPLETE,
                samples=SampleTable.of(replace(s, shard=renumbered[s.shard]) for s in samples),
                shards=[shards[shard] for shard in used],
                partial=[replace(rollout, shard=renumbered[rollout.shard]) for rollout in partial],
                baseline=verdict(group["baseline"]) if group["baseline"] else None,
                source=group.get("source", ""),
                data_source=group.get("data_source", ""),
                prompt_id=group.get("prompt_id", ""),
                number=group.get("number", UNKNOWN),
                engine=group.get("engine", UNKNOWN),
            )
        )
    return groups
