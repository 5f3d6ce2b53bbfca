"""Groups of samples between rollout and step: as one batch, and as plain values in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from rlcli.data.columns import RAGGED, RENAMED, Samples
from rlcli.data.messages import Collected, PartialRollout, PromptTask
from rlcli.data.prompts.dataset_mixture import Cursor
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.rollout.rollout_call import GREEDY
from rlcli.types import Outcome, Sample, Verdict

if TYPE_CHECKING:
    import numpy as np


UNKNOWN = -1


class Source(Protocol):
    """Returns the samples of each step. cursor: with `state`, all state between steps. begun: whether samples of the
    next step have been generated."""

    prompts: TokenizedPrompts
    cursor: Cursor

    @property
    def begun(self) -> bool: ...

    def take(self, step: int) -> Collected:
        """The verified samples of step `step`. `Sample.prompt` counts the groups from 0 without gaps."""
        ...

    def ahead(self, step: int, is_over: Callable[[], bool]) -> None:
        """While step `step` is trained on, generate for the steps after it. is_over: whether the engines are needed."""
        ...

    def state(self) -> tuple[dict[str, Any], list[Any]]:
        """For `restore`: plain values, and references to shards of tokens."""
        ...

    def restore(self, state: Mapping[str, Any], shards: Sequence[Any]) -> None: ...

    def drop(self) -> None:
        """Discard what was generated for later steps."""
        ...


@dataclass(frozen=True)
class PartialGroup:
    """The known part of an incomplete group. index: of its prompt in the dataset. first_sample: offset of its samples
    in their seeds. begun: responses that were aborted; other missing ones were not started."""

    index: int
    first_sample: int = 0
    begun: Sequence[PartialRollout] = ()


@dataclass(frozen=True)
class Group:
    """The samples of one prompt. shards: references to their tokens, indexed by `Sample.shard`. baseline: verdict on
    the greedy response, if any. step: in which it was started. open: None if the group is complete. source: the name
    of its dataset, in runs with several. data_source: of its row. prompt_id: of its prompt; empty if an older
    checkpoint does not have it. number: by which the engines know it, and engine: which of them has begun it, while it
    is open; UNKNOWN if none."""

    samples: Samples
    shards: Sequence[Any]
    baseline: Verdict | None
    step: int
    open: PartialGroup | None = None
    source: str = ""
    data_source: str = ""
    prompt_id: str = ""
    number: int = UNKNOWN
    engine: int = UNKNOWN

    @property
    def begun(self) -> list[int]:
        """Samples that were aborted."""
        return [one.sample for one in self.open.begun] if self.open else []

    def grown(
        self, samples: Samples, begun: Sequence[PartialRollout], shards: Sequence[Any], baseline: Verdict | None
    ) -> Group:
        """This open group plus what a round generated for it; still open. One of `shards`, as samples and begun index
        them, holds all that is new: one worker generates a whole group."""
        assert self.open is not None, "the group is complete"
        places = {*samples.shard.tolist(), *(one.shard for one in begun)}
        assert len(places) <= 1, "one worker generates a whole group"
        new = {one.sample for one in begun} | set(samples.sample.tolist()) | ({GREEDY} if baseline else set())
        at = len(self.shards)
        kept = [one for one in self.open.begun if one.sample not in new] + [replace(one, shard=at) for one in begun]
        joined = replace(samples, shard=samples.shard * 0 + at)
        if len(self.samples):
            joined = Samples.joined([self.samples, joined])
            joined = joined.take(joined.sample.argsort())  # not by prompt: each round renumbers prompts
        all_shards = [*self.shards, *(shards[place] for place in places)]
        used = sorted({*joined.shard.tolist(), *(one.shard for one in kept)})
        place = {shard: number for number, shard in enumerate(used)}
        return replace(
            self,
            samples=replace(joined, shard=_counted(joined.shard, place)),
            shards=[all_shards[shard] for shard in used],
            baseline=baseline or self.baseline,
            open=replace(self.open, begun=[replace(one, shard=place[one.shard]) for one in kept]),
        )


def task_of(group: Group, position: int, prompts: TokenizedPrompts, samples: int, greedy: bool) -> PromptTask:
    """The missing part of an open group, to be generated as the prompt `position` of a round. samples: of a complete
    group. greedy: whether it has a baseline."""
    assert group.open is not None, "the group is complete"
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
    """The groups as one batch: prompts and shards renumbered, each shard's reference once."""
    import numpy as np

    shards, places = _places(groups)
    counts = [len(group.samples) for group in groups]
    columns = [_counted(group.samples.shard, place) for group, place in zip(groups, places, strict=True)]
    samples = replace(
        Samples.joined([group.samples for group in groups]),
        prompt=np.repeat(np.arange(len(groups)), counts),
        shard=np.concatenate(columns) if columns else np.zeros(0, np.int64),
    )
    baselines = {position: group.baseline for position, group in enumerate(groups) if group.baseline is not None}
    return Collected(
        samples,
        shards,
        0.0,
        0.0,
        baselines=baselines,
        sources=[group.source for group in groups],
        data_sources=[group.data_source for group in groups],
        prompt_ids=[group.prompt_id for group in groups],
    )


def by_prompt(samples: Samples) -> list[Samples]:
    """The samples of each prompt that has any. `samples` must be ordered by prompt."""
    import numpy as np

    starts = np.flatnonzero(np.diff(samples.prompt, prepend=-1)).tolist()
    return [samples[start:end] for start, end in pairwise([*starts, len(samples)])]


def as_plain(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Groups as JSON values with numbered shards, and the references to those shards."""
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
                "data_source": group.data_source,
                "prompt_id": group.prompt_id,
                "number": group.number,
                "engine": group.engine,
            }
        )
    return plain, shards


def as_groups(plain: Sequence[Mapping[str, Any]], shards: Sequence[Any]) -> list[Group]:
    """The inverse of `as_plain`."""

    def verdict(fields: Mapping[str, Any]) -> Verdict:
        return Verdict(**{**fields, "outcome": Outcome(fields["outcome"])})

    def sample(fields: Mapping[str, Any]) -> Sample:
        known = {RENAMED.get(name, name): value for name, value in fields.items()}
        known |= {name: tuple(known[name]) for name in RAGGED if name in known}
        return Sample(**{**known, "verdict": verdict(fields["verdict"])})

    groups = []
    for group in plain:
        samples = [sample(fields) for fields in group["samples"]]
        baseline = verdict(group["baseline"]) if group["baseline"] else None
        open = group.get("open")  # Older checkpoints lack it.
        begun = [PartialRollout(**fields) for fields in open["begun"]] if open else []
        used = sorted({*(s.shard for s in samples), *(one.shard for one in begun)})
        place = {shard: number for number, shard in enumerate(used)}
        groups.append(
            Group(
                Samples.of(replace(s, shard=place[s.shard]) for s in samples),
                [shards[shard] for shard in used],
                baseline,
                group["step"],
                open and PartialGroup(**{**open, "begun": [replace(one, shard=place[one.shard]) for one in begun]}),
                group.get("source", ""),
                group.get("data_source", ""),
                group.get("prompt_id", ""),
                group.get("number", UNKNOWN),
                group.get("engine", UNKNOWN),
            )
        )
    return groups


def _places(groups: Sequence[Group]) -> tuple[list[Any], list[dict[int, int]]]:
    """The references of all groups, each once, and for each group: shard → its index among them."""
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
    """A column of shards, each replaced by its index."""
    import numpy as np

    if len(place) == 1:  # the usual case
        counted: np.ndarray = np.full(len(column), next(iter(place.values())), np.int64)
    else:
        counted = np.array([place[shard] for shard in column.tolist()], np.int64)
    return counted
