"""Groups of samples between the rollout and the step: as one batch, and as a checkpoint keeps those that wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rlcli.data.cursor import PromptCursor
from rlcli.data.prompts import TokenizedPrompts
from rlcli.trainer.collect import Collected
from rlcli.types import Outcome, Sample, Verdict
from rlcli.workers.samples import Samples


class Source(Protocol):
    """Gives the samples of one step after another. cursor, waiting: all that lives from one step to the next."""

    prompts: TokenizedPrompts
    cursor: PromptCursor
    waiting: list[Group]

    def take(self, step: int) -> Collected:
        """The verified samples of step `step`. `Sample.prompt` counts the groups from 0 without gaps."""
        ...


@dataclass(frozen=True)
class Group:
    """The samples of one prompt. shard: reference to their tokens. baseline: verdict on the greedy response, if any.
    step: in which they were generated."""

    samples: Samples
    shard: Any
    baseline: Verdict | None
    step: int


def batch_of(groups: Sequence[Group]) -> Collected:
    """The groups as one batch: prompts and shards counted anew, each shard's reference once."""
    import numpy as np

    places: dict[int, int] = {}
    shards: list[Any] = []
    for group in groups:
        if id(group.shard) not in places:
            places[id(group.shard)] = len(shards)
            shards.append(group.shard)
    counts = [len(group.samples) for group in groups]
    samples = Samples.joined([group.samples for group in groups]).moved(
        prompt=np.repeat(np.arange(len(groups)), counts),
        shard=np.repeat([places[id(group.shard)] for group in groups], counts),
    )
    baselines = {position: group.baseline for position, group in enumerate(groups) if group.baseline is not None}
    return Collected(samples, shards, generate_s=0.0, verify_s=0.0, baselines=baselines)


def as_plain(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Groups as JSON holds them, their shards counted, and the references to those shards."""
    batch = batch_of(groups)
    plain = [
        {
            "step": group.step,
            "baseline": group.baseline and asdict(group.baseline),
            "samples": [asdict(s) for s in batch.samples.take(batch.samples.prompt == position)],
        }
        for position, group in enumerate(groups)
    ]
    return plain, batch.shards


def as_groups(plain: Sequence[Mapping[str, Any]], shards: Sequence[Any]) -> list[Group]:
    """The groups that `as_plain` was given."""

    def verdict(fields: Mapping[str, Any]) -> Verdict:
        return Verdict(**{**fields, "outcome": Outcome(fields["outcome"])})

    groups = []
    for group in plain:
        samples = [Sample(**{**fields, "verdict": verdict(fields["verdict"])}) for fields in group["samples"]]
        baseline = verdict(group["baseline"]) if group["baseline"] else None
        groups.append(Group(Samples.of(samples), shards[samples[0].shard], baseline, group["step"]))
    return groups
