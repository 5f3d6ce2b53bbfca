"""Groups of samples between the rollout and the step: as one batch, and as a checkpoint keeps those that wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from rlcli.data.cursor import PromptCursor
from rlcli.data.mixture import MixedCursor
from rlcli.data.prompts import TokenizedPrompts
from rlcli.trainer.collect import Collected
from rlcli.types import Outcome, Sample, Verdict
from rlcli.workers.rollout_role import GREEDY
from rlcli.workers.samples import Samples
from rlcli.workers.work import Begun, PromptTask

if TYPE_CHECKING:
    import numpy as np


class Source(Protocol):
    """Gives the samples of one step after another. cursor, waiting: all that lives from one step to the next."""

    prompts: TokenizedPrompts
    cursor: PromptCursor | MixedCursor
    waiting: list[Group]

    def take(self, step: int) -> Collected:
        """The verified samples of step `step`. `Sample.prompt` counts the groups from 0 without gaps."""
        ...


@dataclass(frozen=True)
class Open:
    """What is known of a group that is not whole. index: of its prompt in the dataset. first_sample: what its samples
    count from in their seeds. begun: responses that were broken off; others that are missing were not begun."""

    index: int
    first_sample: int = 0
    begun: Sequence[Begun] = ()


@dataclass(frozen=True)
class Group:
    """The samples of one prompt. shards: references to their tokens, as `Sample.shard` counts them. baseline: verdict
    on the greedy response, if any. step: in which it was begun. open: None of a group that is whole. source: the name
    of its dataset, where a run has several."""

    samples: Samples
    shards: Sequence[Any]
    baseline: Verdict | None
    step: int
    open: Open | None = None
    source: str = ""

    @property
    def begun(self) -> list[int]:
        """Which samples were broken off."""
        return [one.sample for one in self.open.begun] if self.open else []

    def grown(self, samples: Samples, begun: Sequence[Begun], shards: Sequence[Any], baseline: Verdict | None) -> Group:
        """This open group with what a round gave of it; still open. Of `shards`, as samples and begun count them, one
        holds all that is new: one worker generates a whole group."""
        assert self.open is not None, "a group that is whole"
        places = {*samples.shard.tolist(), *(one.shard for one in begun)}
        assert len(places) <= 1, "one worker generates a whole group"
        new = {one.sample for one in begun} | set(samples.sample.tolist()) | ({GREEDY} if baseline else set())
        at = len(self.shards)
        kept = [one for one in self.open.begun if one.sample not in new] + [replace(one, shard=at) for one in begun]
        joined = samples.moved(prompt=samples.prompt, shard=samples.shard * 0 + at)
        if len(self.samples):
            joined = Samples.joined([self.samples, joined])
            joined = joined.take(joined.sample.argsort())  # and not by prompt: each round counts those anew
        all_shards = [*self.shards, *(shards[place] for place in places)]
        used = sorted({*joined.shard.tolist(), *(one.shard for one in kept)})
        place = {shard: number for number, shard in enumerate(used)}
        return replace(
            self,
            samples=joined.moved(prompt=joined.prompt, shard=_counted(joined.shard, place)),
            shards=[all_shards[shard] for shard in used],
            baseline=baseline or self.baseline,
            open=replace(self.open, begun=[replace(one, shard=place[one.shard]) for one in kept]),
        )


def task_of(group: Group, position: int, prompts: TokenizedPrompts, samples: int, greedy: bool) -> PromptTask:
    """What is missing of an open group, to be generated as the prompt `position` of a round. samples: of a whole group.
    greedy: whether that has a baseline."""
    assert group.open is not None, "a group that is whole"
    there = set(group.samples.sample.tolist())
    return PromptTask(
        position,
        prompts.tokens(group.open.index),
        prompts.prompts[group.open.index],
        samples,
        group.open.first_sample,
        greedy and group.baseline is None,
        tuple(index for index in range(samples) if index not in there) if there else None,
        group.step,
        {one.sample: one for one in group.open.begun},
        group.shards,
    )


def batch_of(groups: Sequence[Group]) -> Collected:
    """The groups as one batch: prompts and shards counted anew, each shard's reference once."""
    import numpy as np

    shards, places = _places(groups)
    counts = [len(group.samples) for group in groups]
    columns = [_counted(group.samples.shard, place) for group, place in zip(groups, places, strict=True)]
    samples = Samples.joined([group.samples for group in groups]).moved(
        prompt=np.repeat(np.arange(len(groups)), counts),
        shard=np.concatenate(columns) if columns else np.zeros(0, np.int64),
    )
    baselines = {position: group.baseline for position, group in enumerate(groups) if group.baseline is not None}
    sources = [group.source for group in groups]
    return Collected(samples, shards, generate_s=0.0, verify_s=0.0, baselines=baselines, sources=sources)


def by_prompt(samples: Samples) -> list[Samples]:
    """Those of each prompt that has any, of samples in the order of their prompts."""
    import numpy as np

    starts = np.flatnonzero(np.diff(samples.prompt, prepend=-1)).tolist()
    return [samples[start:end] for start, end in pairwise([*starts, len(samples)])]


def as_plain(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Groups as JSON holds them, their shards counted, and the references to those shards."""
    batch = batch_of(groups)
    shards, places = _places(groups)
    plain = []
    for position, (group, place) in enumerate(zip(groups, places, strict=True)):
        open = group.open and asdict(group.open)
        for one in open["begun"] if open else ():
            one["shard"] = place[one["shard"]]
        plain.append(
            {
                "step": group.step,
                "baseline": group.baseline and asdict(group.baseline),
                "samples": [asdict(s) for s in batch.samples.take(batch.samples.prompt == position)],
                "open": open,
                "source": group.source,
            }
        )
    return plain, shards


def as_groups(plain: Sequence[Mapping[str, Any]], shards: Sequence[Any]) -> list[Group]:
    """The groups that `as_plain` was given."""

    def verdict(fields: Mapping[str, Any]) -> Verdict:
        return Verdict(**{**fields, "outcome": Outcome(fields["outcome"])})

    groups = []
    for group in plain:
        samples = [Sample(**{**fields, "verdict": verdict(fields["verdict"])}) for fields in group["samples"]]
        baseline = verdict(group["baseline"]) if group["baseline"] else None
        open = group.get("open")  # Checkpoints of before there was such a thing lack it.
        begun = [Begun(**fields) for fields in open["begun"]] if open else []
        used = sorted({*(s.shard for s in samples), *(one.shard for one in begun)})
        place = {shard: number for number, shard in enumerate(used)}
        groups.append(
            Group(
                Samples.of(replace(s, shard=place[s.shard]) for s in samples),
                [shards[shard] for shard in used],
                baseline,
                group["step"],
                open and Open(**{**open, "begun": [replace(one, shard=place[one.shard]) for one in begun]}),
                group.get("source", ""),
            )
        )
    return groups


def _places(groups: Sequence[Group]) -> tuple[list[Any], list[dict[int, int]]]:
    """The references of all groups, each once, and of each group: shard → its place among them."""
    shards: list[Any] = []
    found: dict[int, int] = {}
    places = []
    for group in groups:
        for shard in group.shards:
            if id(shard) not in found:
                found[id(shard)] = len(shards)
                shards.append(shard)
        places.append({number: found[id(shard)] for number, shard in enumerate(group.shards)})
    return shards, places


def _counted(column: np.ndarray, place: Mapping[int, int]) -> np.ndarray:
    """A column of shards, each by its place."""
    import numpy as np

    if len(place) == 1:  # as a rule
        counted: np.ndarray = np.full(len(column), next(iter(place.values())), np.int64)
    else:
        counted = np.array([place[shard] for shard in column.tolist()], np.int64)
    return counted
