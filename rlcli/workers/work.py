"""What crosses between the controller and the workers: tasks to generate, reports of it, and rows to train on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

from rlcli.types import Prompt, Verdict
from rlcli.workers.samples import Samples

Role = Literal["policy", "critic", "process_reward", "engine"]
"""What a worker may host."""


@dataclass(frozen=True)
class Begun:
    """A response that was broken off: its tokens so far, `tokens` of them, are row `row` of the shard `shard`. prompt,
    sample: as `Sample` counts them. version: of the weights that drew the first of its tokens."""

    prompt: int
    sample: int
    shard: int
    row: int
    tokens: int
    version: int


@dataclass(frozen=True)
class PromptTask:
    """One group to generate. prompt: index in the step. tokens: int32 ids of the templated prompt. source: its row.
    samples: how many responses. first_sample: what their indexes count from in seeds; not 0 where a step draws a prompt
    again, so that the second group is not a copy of the first. greedy: one greedy response besides, as a baseline.
    wanted: which samples of the group to generate, where some are there already; None: all. step: in which the group
    was begun, for its seeds; None: in this one. begun: sample → what there is of it. shards: references to SampleShards
    as `Begun.shard` counts them."""

    prompt: int
    tokens: Any
    source: Prompt
    samples: int
    first_sample: int = 0
    greedy: bool = False
    wanted: tuple[int, ...] | None = None
    step: int | None = None
    begun: Mapping[int, Begun] = field(default_factory=dict)
    shards: Sequence[Any] = ()

    @property
    def indexes(self) -> Sequence[int]:
        """Within the group, of the samples to generate."""
        return range(self.samples) if self.wanted is None else self.wanted

    @property
    def responses(self) -> int:
        return len(self.indexes) + self.greedy

    def load(self, limit: int) -> int:
        """What it may come to, in tokens, with responses of `limit` tokens."""
        return len(self.tokens) + self.responses * limit - sum(one.tokens for one in self.begun.values())


@dataclass(frozen=True)
class RolloutReport:
    """What one worker generated and verified; its tokens are asked for apart (`Worker.take_shard`). generate_s: until
    the last response was finished; verify_s: how long verdicts were still awaited after that. baselines: prompt →
    verdict on its greedy response, where one was asked for. begun: what was broken off. tokens: drawn in all. version:
    of the engine's weights. finished: responses, since the last `Progress`."""

    rank: int
    samples: Samples
    generate_s: float
    verify_s: float
    baselines: dict[int, Verdict] = field(default_factory=dict)
    begun: list[Begun] = field(default_factory=list)
    tokens: int = 0
    version: int = 0
    finished: int = 0

    @property
    def seconds(self) -> float:
        return self.generate_s + self.verify_s


@dataclass(frozen=True)
class Progress:
    """How many responses a worker has finished since it last said so."""

    finished: int


@dataclass(frozen=True)
class MicroWork:
    """The rows of one micro-batch. samples: int64 `[S]`, which of the step's samples they are. shards, rows: int64
    `[S]`, where each lies."""

    samples: Any
    shards: Any
    rows: Any


@dataclass(frozen=True)
class MiniWork:
    """The denominators of one optimizer update, global over ranks. right_tokens: response tokens of right samples."""

    tokens: int
    sequences: int
    groups: int
    max_length: int
    right_tokens: int


@dataclass(frozen=True)
class StepWork:
    """What every rank is told of a step alike. columns: what is known of each of its N samples, by name: arrays
    `[N, …]`. seed: of whatever is drawn at random for this step's samples. shards: references to what was generated.

    Each rank needs some of the shards, and is sent all of them in this one object: a reference in the arguments of a
    call costs the controller more than the whole list costs a rank, and each of R ranks reads most of R shards.
    """

    minibatches: list[MiniWork]
    columns: dict[str, Any]
    seed: int
    shards: list[Any]


@dataclass(frozen=True)
class RankWork:
    """One rank's share of a step: its R rows, end to end. samples: int64 `[R]`, which of the step's samples they are.
    shards, rows: int64 `[R]`, in which of the step's shards each lies, and where there. counts:
    [minibatch][micro-batch] → rows.

    Some arrays, and not one for each micro-batch: a step of many ranks has thousands of these.
    """

    samples: Any
    shards: Any
    rows: Any
    counts: list[list[int]]

    @property
    def minibatches(self) -> list[list[MicroWork]]:
        """[minibatch][micro-batch]"""
        micros, start = [], 0
        for counts in self.counts:
            ends = list(accumulate(counts, initial=start))
            micros.append([self._micro(slice(*bounds)) for bounds in pairwise(ends)])
            start = ends[-1]
        return micros

    def _micro(self, at: slice) -> MicroWork:
        return MicroWork(self.samples[at], self.shards[at], self.rows[at])


@dataclass(frozen=True)
class Coefficients:
    """What steers an update and may change from step to step."""

    lr: float
    kl: float
    entropy: float


def step_seed(run_seed: int, step: int) -> int:
    """63-bit seed of what is drawn beside the sampling of responses in one step."""
    return sample_seed(run_seed, "step", step, "", 0)


def sample_seed(run_seed: int, purpose: str, step: int, prompt_id: str, sample: int) -> int:
    """63-bit seed of one response: a hash, since seeds that differ by one give correlated streams in vLLM.

    It names the response and nothing else, so batch composition and scheduling do not change what is sampled.
    """
    text = repr((run_seed, purpose, step, prompt_id, sample))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
