"""Where a step's samples come from: prompts in the cursor's order, and only the groups that are worth training on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from rlcli.config.schema import RunConfig
from rlcli.data.cursor import PromptCursor
from rlcli.data.prompts import TokenizedPrompts
from rlcli.errors import RunFailed
from rlcli.rollout.engine import Sampling
from rlcli.trainer.collect import Collected, OnProgress, collect
from rlcli.trainer.groups import Group, Source, batch_of
from rlcli.trainer.supervised import SupervisedSource
from rlcli.trainer.verifying import Failures, part_weights
from rlcli.types import Prompt
from rlcli.workers.group import WorkerGroup
from rlcli.workers.rollout_role import RolloutCall


@dataclass
class _Rounds:
    """What the rounds of one step have given so far. drawn: how often each prompt. generated, score: how many samples,
    and the sum of their scores."""

    drawn: Counter[int] = field(default_factory=Counter)
    failures: Failures = field(default_factory=Failures)
    count: int = 0
    generated: int = 0
    score: float = 0.0
    asked: int = 0
    tokens: int = 0
    dropped: int = 0
    generate_s: float = 0.0
    verify_s: float = 0.0

    def add(self, round: Collected, prompts: Sequence[Prompt]) -> None:
        """prompts: those of this round, as `Sample.prompt` counts them."""
        self.count += 1
        self.generated += len(round.samples)
        self.score += math.fsum(round.samples.score)
        self.failures.add_samples(prompts, round.samples)
        for prompt, verdict in round.baselines.items():
            self.failures.add(prompts[prompt], verdict)
        self.asked += len(round.samples) + len(round.baselines)
        self.tokens += round.generated_tokens
        self.generate_s += round.generate_s
        self.verify_s += round.verify_s

    @property
    def mean_score(self) -> float:
        return self.score / max(self.generated, 1)


def source_of(
    config: RunConfig,
    prompts: TokenizedPrompts,
    workers: WorkerGroup,
    samples: Path,
    *,
    greedy: bool,
    on_progress: OnProgress,
) -> Source:
    """What a run's configuration asks for. samples: the folder where workers write theirs, if they are to be saved."""
    cursor = PromptCursor(len(prompts), config.train.seed, config.data.shuffle)
    if config.data.response:
        return SupervisedSource(prompts, cursor, config.rollout.prompts_per_step)
    return RolloutSource(
        workers,
        prompts,
        cursor,
        config,
        save_as=lambda step: by_rank(samples, step) if config.tracking.save_samples else "",
        greedy=greedy,
        on_progress=on_progress,
    )


class RolloutSource:
    """Draws prompts from the cursor, has the workers generate and verify, and refills what it drops.

    Dynamic sampling (DAPO, arXiv 2503.14476): groups that break the rule `dynamic_sampling.keep` are replaced by new
    ones until `rollout.prompts_per_step` good ones are there, in at most `max_batches` rounds. Each round generates
    `oversample` times what is missing (as much as is missing where every group is kept), and what is good beyond the
    step waits for the next one, tokens and all; for no later one, whose policy would be too far from theirs.

    What is sampled is a function of (seed, step, prompt, sample), whatever the layout of the workers: a prompt that a
    step draws again, in another round too, counts its samples on.

    cursor, waiting: all that lives from one step to the next. save_as: step → where each worker writes its samples,
    `{rank}` left for it to fill in, or empty; rounds after the first add their number. greedy: ask for the baselines.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        prompts: TokenizedPrompts,
        cursor: PromptCursor,
        config: RunConfig,
        *,
        save_as: Callable[[int], str],
        greedy: bool,
        on_progress: OnProgress,
    ) -> None:
        self.workers, self.prompts, self.cursor, self.config = workers, prompts, cursor, config
        self.save_as, self.greedy, self.on_progress = save_as, greedy, on_progress
        self.waiting: list[Group] = []
        self.part_weights = part_weights(config.algorithm.advantage, {prompt.verifier for prompt in prompts.prompts})

    def take(self, step: int) -> Collected:
        """The samples of step `step`: of `rollout.prompts_per_step` groups, or of fewer where the rounds run out.

        Raises RunFailed where not one group is good, or where too many verifications fail.
        """
        wanted, rules = self.config.rollout.prompts_per_step, self.config.dynamic_sampling
        oversample = 1.0 if rules.keep == "all" else rules.oversample
        good, rounds = [group for group in self.waiting if group.step == step - 1], _Rounds()
        stale = sum(len(group.samples) for group in good[:wanted])
        while len(good) < wanted and rounds.count < rules.max_batches:
            # 3 × 1.1 is 3.3000000000000003, but 10 × 1.1 is 11 prompts, not 12.
            count = math.ceil(round((wanted - len(good)) * oversample, 6))
            good = good + self._generate(step, count, rounds)
        if not good:
            raise RunFailed(
                f"dynamic_sampling.keep = {rules.keep} kept none of the {rounds.dropped} groups of step {step}, in "
                f"{rounds.count} rounds; the mean score of their {rounds.generated} samples is "
                f"{rounds.mean_score:.3g}",
                "the data are too hard for the model where the score is low and too easy where it is high: take other "
                "data, more rollout.samples_per_prompt, or dynamic_sampling.keep = all",
            )
        self.waiting = good[wanted:]
        return replace(
            batch_of(good[:wanted]),
            generate_s=rounds.generate_s,
            verify_s=rounds.verify_s,
            rounds=rounds.count,
            generated=rounds.generated,
            generated_score=rounds.mean_score,
            generated_tokens=rounds.tokens,
            dropped=rounds.dropped,
            kept_over=len(self.waiting),
            stale=stale,
            part_weights=self.part_weights,
        )

    def _generate(self, step: int, count: int, rounds: _Rounds) -> list[Group]:
        """One round of `count` prompts: the groups worth keeping."""
        rollout, before = self.config.rollout, rounds.asked
        sampling = Sampling(rollout.temperature, rollout.max_response_tokens, rollout.top_p)
        save_as = _of_round(self.save_as(step), rounds.count + 1)
        drawn = self.cursor.take(count)
        collected = collect(
            self.workers,
            self.prompts,
            drawn,
            rollout.samples_per_prompt,
            RolloutCall(sampling, self.config.train.seed, "train", step, save_as),
            tensor_parallel=rollout.tensor_parallel,
            greedy=self.greedy,
            drawn=rounds.drawn,
            on_progress=lambda done, total: self.on_progress(before + done, before + total),
        )
        rounds.add(collected, [self.prompts.prompts[index] for index in drawn])
        rounds.failures.check(self.config.verifier.max_crash_rate)
        kept = self._kept(collected, step)
        rounds.dropped += count - len(kept)
        return kept

    def _kept(self, collected: Collected, step: int) -> list[Group]:
        groups = _groups(collected, step)
        rules = self.config.dynamic_sampling
        if rules.keep == "all":
            return groups
        import torch

        from rlcli.algorithms.selection import keep_groups

        scores, labels = collected.samples.score, collected.samples.prompt
        kept = keep_groups(torch.tensor(scores), torch.tensor(labels), keep=rules.keep, low=rules.low, high=rules.high)
        good = set(labels[kept.numpy()].tolist())
        return [group for group in groups if int(group.samples.prompt[0]) in good]


def _groups(collected: Collected, step: int) -> list[Group]:
    """The groups of one round, in order."""
    import numpy as np

    samples = collected.samples
    starts = np.flatnonzero(np.diff(samples.prompt, prepend=-1)).tolist()
    members = [samples[start:end] for start, end in pairwise([*starts, len(samples)])]
    for own in members:
        assert (own.shard == own.shard[0]).all(), "one worker generates a whole group"
    return [
        Group(own, collected.shards[own.shard[0]], collected.baselines.get(int(own.prompt[0])), step) for own in members
    ]


def _of_round(path: str, number: int) -> str:
    """`step-000001.rank-{rank}.parquet`, and from the second round on `step-000001.rank-{rank}.round-2.parquet`."""
    return path if number == 1 or not path else str(Path(path).with_suffix(f".round-{number}.parquet"))


def by_rank(folder: Path, step: int) -> str:
    """Where each worker writes its samples: `step-000001.rank-{rank}.parquet`, the rank left for it to fill in."""
    return str(folder / f"step-{step:06d}.rank-{{rank}}.parquet")
