"""Messages between the controller and the workers: generation tasks, their reports, and settings of an update."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from rlcli.data.columns import SampleTable
from rlcli.data.rollout_stats import RolloutStats
from rlcli.types import Prompt, Verdict

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32, UInt8

Role = Literal["policy", "critic", "process_reward", "teacher", "engine"]
"""The roles that a worker may have."""

ShardRef: TypeAlias = object
"""Reference to a `SampleShard` in Ray's object store, which the controller only passes on; the shard itself, within one
process."""


@dataclass(frozen=True)
class PartialRollout:
    """An aborted response, to be resumed. Its tokens so far are a row of a shard.

    >>> PartialRollout(prompt=3, sample=0, shard=1, row=7, tokens=120, version=4).tokens
    120
    """

    prompt: int
    """Number of its group, as in `Sample.prompt`."""
    sample: int
    """Index within the group; `GREEDY` (-1) for the greedy baseline."""
    shard: int
    """Index of the shard with its trajectory so far."""
    row: int
    """Row of the shard."""
    tokens: int
    """Response tokens so far."""
    version: int
    """Policy version that generated the first of them."""


@dataclass(frozen=True)
class PromptTask:
    """One group to generate, or what is missing of it.

    >>> row = Prompt("row:7", ({"role": "user", "content": "2 + 2?"},), "s", "math", "gsm8k", "4")
    >>> task = PromptTask(3, [5, 6, 7], row, samples=4, wanted=(1, 3))
    >>> task.responses, task.load(limit=100)
    (2, 203)
    """

    group: int
    """Number of the group in the round; of a streaming run, in the run."""
    tokens: Int32[np.ndarray, " n"]
    """Token ids of the prompt, with the chat template applied."""
    prompt: Prompt
    """Row of the dataset."""
    samples: int
    """G, samples of a complete group."""
    first_sample: int = 0
    """Offset of the samples' indexes in seeds: not 0 if a step takes a prompt twice, since its second group must not be
    a copy of the first."""
    greedy: bool = False
    """True to generate a greedy response too, as a baseline."""
    wanted: tuple[int, ...] | None = None
    """Samples to generate, if others of the group exist already; None: all."""
    step: int | None = None
    """Step in which the group was queued, for its seeds; None: the step of the call."""
    partial: Mapping[int, PartialRollout] = field(default_factory=dict)
    """Sample → its partial rollout, to be resumed."""
    shards: Sequence[ShardRef] = ()
    """Shards that `PartialRollout.shard` indexes."""
    images: tuple[UInt8[np.ndarray, "height width 3"], ...] = ()
    """Images of `prompt`, resized for the model, on the worker that generates."""

    @property
    def indexes(self) -> Sequence[int]:
        """Indexes within the group of the samples to generate."""
        return range(self.samples) if self.wanted is None else self.wanted

    @property
    def responses(self) -> int:
        """Number of responses to generate."""
        return len(self.indexes) + self.greedy

    def load(self, limit: int) -> int:
        """Its maximum size in tokens, with responses of `limit` tokens."""
        return len(self.tokens) + self.responses * limit - sum(rollout.tokens for rollout in self.partial.values())


class ScoredGroup(NamedTuple):
    """Scores of a complete group, for the record of its prompt (`prompts.jsonl`)."""

    prompt_id: str
    """Id of the prompt."""
    scored: int
    """Samples whose verification did not fail, and that `train.truncated` does not mask."""
    correct: int
    """Scored samples that are correct."""
    tokens: int
    """Response tokens of the group."""
    is_kept: bool
    """True if dynamic sampling kept it."""


@dataclass(frozen=True, slots=True)  # pickled without the names: every rank sends one
class RolloutBatch:
    """Verified samples, references to their tokens, and counters: of one worker's report, of a round or of a step.

    Two samples of one prompt, as a worker reports them:

    >>> from rlcli.types import Outcome, Sample
    >>> verdicts = [Verdict(0.0, Outcome.WRONG), Verdict(1.0, Outcome.OK)]
    >>> samples = SampleTable.of(Sample(0, i, 0, i, 5, 9, "stop", v, version=3) for i, v in enumerate(verdicts))
    >>> report = RolloutBatch(samples, stats=RolloutStats(generated_tokens=18, version=3))
    >>> len(report.samples), report.samples.score.tolist(), report.stats.generated_tokens
    (2, [0.0, 1.0], 18)
    """

    samples: SampleTable
    """The samples; of a round or a step, ordered by prompt, then sample, whichever engine generated them."""
    shards: list[ShardRef] = field(default_factory=list)
    """Shards with their trajectories, indexed by `Sample.shard`; empty in a worker's report (`Worker.take_shard`)."""
    stats: RolloutStats = field(default_factory=RolloutStats)
    """Counters of the generation, of dropped and waiting groups too."""
    baselines: Mapping[int, Verdict] = field(default_factory=dict)
    """Prompt → verdict on its greedy response, if the algorithm uses baselines."""
    partial: Sequence[PartialRollout] = ()
    """Responses that were aborted; none in a step's batch."""
    prompt_ids: Sequence[str] = ()
    """Id of the prompt of each group of the step."""
    sources: Sequence[str] = ()
    """Name of the dataset of each group of the step; empty names in runs with a single one."""
    data_sources: Sequence[str] = ()
    """`data_source` of each group of the step."""
    part_weights: Mapping[str, float] = field(default_factory=dict)
    """Part of the reward → its weight, if the advantage reads weights."""
    scored_groups: Sequence[ScoredGroup] = ()
    """Groups of the step: each completed since the last step, dropped and waiting ones too."""
    selection: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the data cursor at the step."""


@dataclass(frozen=True)
class Progress:
    """Number of responses that a worker has finished since its last report."""

    finished: int


@dataclass(frozen=True)
class Coefficients:
    """Settings of an update that may change from step to step."""

    lr: float
    """Learning rate."""
    kl: float
    """β, weight of the KL to the reference model."""
    entropy: float
    """Weight of the entropy bonus."""


def step_seed(run_seed: int, step: int) -> int:
    """63-bit seed of the random draws of one step other than the sampling of responses."""
    return sample_seed(run_seed, "step", step, "", 0)


def sample_seed(run_seed: int, purpose: str, step: int, prompt_id: str, sample: int) -> int:
    """63-bit seed of one response: a hash, since seeds that differ by one give correlated streams in vLLM.

    It depends on the response alone, so batch composition and scheduling do not change what is sampled.
    """
    text = repr((run_seed, purpose, step, prompt_id, sample))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
