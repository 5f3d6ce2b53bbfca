"""Messages between the controller and the workers: generation tasks, their reports, and settings of an update."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcli.data.columns import Samples
from rlcli.types import Prompt, Verdict

Role = Literal["policy", "critic", "process_reward", "teacher", "engine"]
"""The roles that a worker may have."""


@dataclass(frozen=True)
class PartialRollout:
    """An interrupted response: its trajectory so far, with `tokens` drawn tokens, is row `row` of the shard `shard`.
    prompt, sample: numbered as in `Sample`. version: of the weights that drew its first token."""

    prompt: int
    sample: int
    shard: int
    row: int
    tokens: int
    version: int


@dataclass(frozen=True)
class PromptTask:
    """One group to generate. prompt: index in the step. tokens: int32 ids of the templated prompt. source: its row.
    samples: how many responses. first_sample: offset of their indexes in seeds; not 0 if a step draws a prompt again,
    so that the second group is not a copy of the first. greedy: one additional greedy response, as a baseline.
    wanted: which samples of the group to generate, if some exist already; None: all. step: in which the group was
    started, for its seeds; None: this one. begun: sample → its partial rollout. shards: references to SampleShards,
    indexed by `PartialRollout.shard`. pictures: those of `source`, resized, on the worker that generates."""

    prompt: int
    tokens: Any
    source: Prompt
    samples: int
    first_sample: int = 0
    greedy: bool = False
    wanted: tuple[int, ...] | None = None
    step: int | None = None
    begun: Mapping[int, PartialRollout] = field(default_factory=dict)
    shards: Sequence[Any] = ()
    pictures: tuple[Any, ...] = ()

    @property
    def indexes(self) -> Sequence[int]:
        """Indexes within the group of the samples to generate."""
        return range(self.samples) if self.wanted is None else self.wanted

    @property
    def responses(self) -> int:
        return len(self.indexes) + self.greedy

    def load(self, limit: int) -> int:
        """Its maximum size in tokens, with responses of `limit` tokens."""
        return len(self.tokens) + self.responses * limit - sum(one.tokens for one in self.begun.values())


@dataclass(frozen=True)
class Collected:
    """Verified samples, and how they were generated: what one worker reports, and what a step collects from all.

    samples: of a step ordered by prompt, then sample, whichever engine generated them. shards: references to their
    trajectories, indexed by `Sample.shard`; empty in a worker's report (see `Worker.take_shard`). generate_s: until the
    last response was finished, of the slowest worker; verify_s: its wait for verdicts after that; idle_s: how long a
    worker, on average, waited for the slowest; all summed over rounds. baselines: prompt → verdict on its greedy
    response, if requested. generated_tokens: drawn in this step.

    With dynamic sampling not all generated samples are used, and some were generated in an earlier step:
    rounds: of generation. generated: all samples of this step, including dropped and waiting ones;
    generated_score: their mean score (0 if there are none). dropped: groups judged not worth training on; too_old:
    others that were dropped for their age. carried_over: good groups that wait for the next step. stale: samples in
    this batch that have tokens of an older policy. in_flight: groups of later steps that are begun.

    If a round ends before all of it is finished: begun: responses that were aborted; aborted: how many. carried:
    samples of this step that an earlier one had aborted. redrawn: conversations that an earlier one had aborted, and
    whose environment answered something else when it heard them again. version: of the weights that generated.
    drafted, accepted: tokens, with `rollout.speculate`.

    part_weights: of the named parts of the reward, if the advantage reads them. sources: the dataset name of each
    group, in runs with several. data_sources: the `data_source` of each group's row. prompt_ids: of each group, in a
    step's samples. judged: of each group that this step completed, dropped and waiting ones too: its prompt's id, its
    judged samples, how many of them are right, the tokens that were drawn for it, and whether it was kept. selection:
    what the data cursor reports.
    """

    samples: Samples
    shards: list[Any]
    generate_s: float
    verify_s: float
    baselines: dict[int, Verdict] = field(default_factory=dict)
    idle_s: float = 0.0
    rounds: int = 0
    generated: int = 0
    generated_score: float = 0.0
    generated_tokens: int = 0
    dropped: int = 0
    too_old: int = 0
    carried_over: int = 0
    stale: int = 0
    in_flight: int = 0
    begun: Sequence[PartialRollout] = ()
    aborted: int = 0
    carried: int = 0
    redrawn: int = 0
    drafted: int = 0
    accepted: int = 0
    version: int = 0
    part_weights: Mapping[str, float] = field(default_factory=dict)
    sources: Sequence[str] = ()
    data_sources: Sequence[str] = ()
    prompt_ids: Sequence[str] = ()
    judged: Sequence[Sequence[Any]] = ()
    selection: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.generate_s + self.verify_s


@dataclass(frozen=True)
class Progress:
    """Number of responses that a worker has finished since its last report."""

    finished: int


@dataclass(frozen=True)
class Coefficients:
    """Settings of an update that may change from step to step."""

    lr: float
    kl: float
    entropy: float


def step_seed(run_seed: int, step: int) -> int:
    """63-bit seed of the random draws of one step other than the sampling of responses."""
    return sample_seed(run_seed, "step", step, "", 0)


def sample_seed(run_seed: int, purpose: str, step: int, prompt_id: str, sample: int) -> int:
    """63-bit seed of one response: a hash, since seeds that differ by one give correlated streams in vLLM.

    It depends on the response alone, so batch composition and scheduling do not change what is sampled.
    """
    text = repr((run_seed, purpose, step, prompt_id, sample))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
