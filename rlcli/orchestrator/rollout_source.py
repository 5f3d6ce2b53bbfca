"""The samples of a step: prompts in the cursor's order, of which only groups worth training on are kept."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlcli.cluster.worker_group import WorkerGroup
from rlcli.config.schema import RunConfig
from rlcli.data.columns import Samples, TruncatedRule
from rlcli.data.messages import Collected, PartialRollout
from rlcli.data.prompts.cursor import PromptCursor
from rlcli.data.prompts.mixture import MixedCursor, cursor_of
from rlcli.data.prompts.prompts import TokenizedPrompts
from rlcli.data.prompts.table import set_of, verifiers_of
from rlcli.errors import RunFailed
from rlcli.orchestrator.dispatcher import OnProgress, collect, gather
from rlcli.orchestrator.groups import Group, PartialGroup, Source, batch_of, by_prompt, task_of
from rlcli.orchestrator.sample_filter import left_out, rewarded
from rlcli.orchestrator.supervised_source import SupervisedSource
from rlcli.orchestrator.verifier_failures import Failures, part_weights
from rlcli.rollout.call import RolloutCall
from rlcli.rollout.engine import Sampling
from rlcli.types import Prompt
from rlcli.workers.roles.integrity import REPORT

NONE = Samples.of([])


@dataclass
class _Rounds:
    """Totals over the rounds of one step. drawn: how often each prompt. groups, generated: how many groups and samples.
    counting, score: how many of them count, and the sum of their scores."""

    drawn: Counter[int] = field(default_factory=Counter)
    failures: Failures = field(default_factory=Failures)
    count: int = 0
    groups: int = 0
    generated: int = 0
    counting: int = 0
    score: float = 0.0
    asked: int = 0
    tokens: int = 0
    dropped: int = 0
    aborted: int = 0
    carried: int = 0
    redrawn: int = 0
    version: int = 0
    generate_s: float = 0.0
    verify_s: float = 0.0
    idle_s: float = 0.0

    def add(self, round: Collected, prompts: Sequence[Prompt], truncated: TruncatedRule) -> None:
        """prompts: those of this round, indexed by `Sample.prompt`. truncated: as `train.truncated`."""
        counting = rewarded(round.samples, truncated).score[round.samples.excluded(truncated) == 0]
        self.count += 1
        self.groups += len(prompts)
        self.generated += len(round.samples)
        self.counting += len(counting)
        self.score += math.fsum(counting)
        self.failures.add_samples(prompts, round.samples)
        for prompt, verdict in round.baselines.items():
            self.failures.add(prompts[prompt], verdict)
        self.asked += len(round.samples) + len(round.baselines)
        self.tokens += round.generated_tokens
        self.redrawn += round.redrawn
        self.aborted, self.version = round.aborted, round.version
        self.generate_s += round.generate_s
        self.verify_s += round.verify_s
        self.idle_s += round.idle_s

    @property
    def mean_score(self) -> float:
        return self.score / max(self.counting, 1)


class DrawCheck:
    """Checks that the data cursor moves: compares each draw of prompts with the previous two. count: of the prompts in
    the dataset, the smallest of several. An epoch's first prompts may equal the last ones of the epoch before, but not
    a third time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._before: list[list[int]] = [[], []]

    def check(self, indexes: list[int]) -> None:
        """Raise RunFailed if the same prompts are drawn a third time although the dataset has others."""
        if len(indexes) > 1 and self._before == [indexes, indexes] and 2 * len(indexes) <= self.count:
            raise RunFailed(
                f"the last {len(indexes)} prompts are drawn a third time, of {self.count} in the dataset: the data "
                "cursor does not move",
                REPORT,
            )
        self._before = [self._before[1], indexes]


def source_of(
    config: RunConfig,
    prompts: TokenizedPrompts,
    workers: WorkerGroup,
    samples: Path,
    *,
    greedy: bool,
    on_progress: OnProgress,
) -> Source:
    """The source that the config asks for. samples: the folder where workers save theirs, if at all."""
    data = config.data
    cursor = cursor_of(prompts.prompts, data.weights, config.train.seed, data.shuffle, data.mix)
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
    """Draws prompts from the cursor, has the workers generate and verify, and replaces dropped groups.

    Dynamic sampling (DAPO, arXiv 2503.14476): groups that break the rule `dynamic_sampling.keep` are replaced by new
    ones until `rollout.prompts_per_step` good ones are there, in at most `max_batches` rounds. Each round generates
    `oversample` times what is missing (as much as is missing if every group is kept). Good groups beyond the step wait
    for the next one with their tokens; not for a later one, whose policy would be too far from theirs.

    The long tail: with `rollout.oversample` a round starts that many times the groups that it needs, ends once enough
    groups are complete, and aborts the others. These resume in the next round or step, before new prompts are drawn:
    finished responses are kept, the others resume from their tokens so far, each token with the log-prob of the policy
    that drew it. So a slow group is late but never wasted; none is dropped for its length.

    What is sampled is a function of (seed, step, prompt, sample), whatever the layout of the workers: if a step draws
    a prompt again, in another round too, its sample numbers continue.

    cursor, waiting: all state between steps. save_as: step → where each worker writes its samples, with `{rank}` for
    it to fill in, or empty; rounds after the first add their number. greedy: generate the baselines.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        prompts: TokenizedPrompts,
        cursor: PromptCursor | MixedCursor,
        config: RunConfig,
        *,
        save_as: Callable[[int], str],
        greedy: bool,
        on_progress: OnProgress,
    ) -> None:
        self.workers, self.prompts, self.cursor, self.config = workers, prompts, cursor, config
        self.save_as, self.greedy, self.on_progress = save_as, greedy, on_progress
        self.waiting: list[Group] = []
        self._draws = DrawCheck(cursor.smallest)
        self.part_weights = part_weights(config.algorithm.advantage, verifiers_of(prompts.prompts))

    def take(self, step: int) -> Collected:
        """The samples of step `step`: of `rollout.prompts_per_step` groups, or fewer if the rounds run out.

        Raises RunFailed if no group is good, or if too many verifications fail.
        """
        wanted, rules, rounds = self.config.rollout.prompts_per_step, self.config.dynamic_sampling, _Rounds()
        good = [group for group in self.waiting if group.open is None and self._is_new(group, step)]
        begun = [group for group in self.waiting if group.open is not None]
        while len(good) < wanted and rounds.count < rules.max_batches:
            kept, begun = self._generate(step, wanted - len(good), begun, rounds)
            good = good + kept
        if not good:
            raise RunFailed(
                f"dynamic_sampling.keep = {rules.keep} kept none of the {rounds.dropped} groups of step {step}, in "
                f"{rounds.count} rounds; the mean score of their {rounds.generated} samples is "
                f"{rounds.mean_score:.3g}",
                "a low score means that the data are too hard for the model, a high one too easy: use other data, more "
                "rollout.samples_per_prompt, or dynamic_sampling.keep = all",
            )
        self.waiting = good[wanted:] + begun
        batch = batch_of(good[:wanted])
        stale = int((batch.samples.version < rounds.version).sum()) if rounds.count else len(batch.samples)
        return replace(
            batch,
            generate_s=rounds.generate_s,
            verify_s=rounds.verify_s,
            idle_s=rounds.idle_s,
            rounds=rounds.count,
            generated=rounds.generated,
            generated_score=rounds.mean_score,
            generated_tokens=rounds.tokens,
            dropped=rounds.dropped,
            carried_over=len(good[wanted:]),
            stale=stale,
            aborted=rounds.aborted,
            carried=rounds.carried,
            redrawn=rounds.redrawn,
            version=rounds.version,
            part_weights=self.part_weights,
        )

    def _is_new(self, group: Group, step: int) -> bool:
        """Whether a complete group that waited is recent enough to train on. With `oversample`, the number of waiting
        groups is bounded by what a step starts with, and each is trained on in its turn."""
        return self.config.rollout.oversample > 1 or group.step == step - 1

    def _generate(
        self, step: int, missing: int, begun: list[Group], rounds: _Rounds
    ) -> tuple[list[Group], list[Group]]:
        """One round for `missing` good groups, which resumes `begun` first: the groups worth keeping, and the
        incomplete ones."""
        rollout, rules, before = self.config.rollout, self.config.dynamic_sampling, rounds.asked
        wanted = _times(missing, 1.0 if rules.keep == "all" else rules.oversample)
        started = max(_times(wanted, rollout.oversample), len(begun))
        indexes = self.cursor.take(started - len(begun))
        self._draws.check(indexes)
        groups = begun + [self._drawn(index, step, rounds) for index in indexes]
        tasks = [
            task_of(group, position, self.prompts, rollout.samples_per_prompt, self.greedy)
            for position, group in enumerate(groups)
        ]
        reports = gather(
            self.workers,
            tasks,
            RolloutCall(
                Sampling(rollout.temperature, rollout.max_response_tokens, rollout.top_p),
                self.config.train.seed,
                "train",
                step,
                _of_round(self.save_as(step), rounds.count + 1),
                truncated=self.config.train.truncated,
                first_group=rounds.groups,
            ),
            tensor_parallel=rollout.tensor_parallel,
            slots=rollout.max_concurrent,
            until=wanted if started > wanted else None,
            on_progress=lambda done, total: self.on_progress(before + done, before + total),
        )
        collected = collect(self.workers, reports)
        rounds.add(collected, [task.source for task in tasks], self.config.train.truncated)
        rounds.failures.check(self.config.verifier.max_crash_rate, self.config.environment.max_failure_rate)
        whole, still = self._sorted_out(groups, collected, step, rounds)
        kept = self._kept(whole)
        rounds.dropped += len(whole) - len(kept)
        return kept, still

    def _drawn(self, index: int, step: int, rounds: _Rounds) -> Group:
        """A group without any samples yet."""
        first = rounds.drawn[index] * self.config.rollout.samples_per_prompt
        rounds.drawn[index] += 1
        rows = self.prompts.prompts
        return Group(NONE, (), None, step, PartialGroup(index, first), set_of(rows, index), rows[index].id)

    def _sorted_out(
        self, groups: list[Group], collected: Collected, step: int, rounds: _Rounds
    ) -> tuple[list[Group], list[Group]]:
        """Adds a round's results: the complete groups, and the incomplete ones."""
        found = {int(own.prompt[0]): own for own in by_prompt(collected.samples)}
        begun: dict[int, list[PartialRollout]] = {}
        for one in collected.begun:
            begun.setdefault(one.prompt, []).append(one)
        whole, still = [], []
        for position, group in enumerate(groups):
            grown = group.grown(
                found.get(position, NONE),
                begun.get(position, ()),
                collected.shards,
                collected.baselines.get(position),
            )
            if group.step < step:
                rounds.carried += len(set(group.begun) - set(grown.begun))
            missing = self.config.rollout.samples_per_prompt - len(grown.samples)
            if missing or (self.greedy and grown.baseline is None):
                still.append(grown)
            else:
                assert grown.open is not None
                self.cursor.account(grown.open.index, int(grown.samples.tokens.sum()))
                whole.append(replace(grown, open=None))
        return whole, still

    def _kept(self, groups: list[Group]) -> list[Group]:
        """The groups worth training on, judged by the samples that count; a group with only one left cannot be
        judged."""
        rules = self.config.dynamic_sampling
        if rules.keep == "all" or not groups:
            return groups
        import torch

        from rlcli.algorithms.selection import keep_groups

        batch, rule = batch_of(groups), self.config.train.truncated
        reasons = left_out(batch.samples, rule, batch.baselines, compared=True)
        samples = rewarded(batch.samples, rule).take(reasons == 0)
        scores, labels = torch.tensor(samples.score), torch.tensor(samples.prompt)
        kept = keep_groups(scores, labels, keep=rules.keep, low=rules.low, high=rules.high)
        return [groups[position] for position in sorted(set(samples.prompt[kept.numpy()].tolist()))]


def _times(count: int, factor: float) -> int:
    """`count` × `factor`, rounded up: 3 × 1.1 is 3.3000000000000003, but 10 × 1.1 is 11 prompts, not 12."""
    return math.ceil(round(count * factor, 6))


def _of_round(path: str, number: int) -> str:
    """`…/rank-{rank}.parquet`, and from the second round on `…/rank-{rank}.round-2.parquet`."""
    return path if number == 1 or not path else str(Path(path).with_suffix(f".round-{number}.parquet"))


def by_rank(folder: Path, step: int) -> str:
    """Where each worker writes its samples: `step-000001/rank-{rank}.parquet`, with the rank for it to fill in. One
    folder per step: workers sync their files to disk themselves, and the controller opens none of them."""
    return str(folder / f"step-{step:06d}" / "rank-{rank}.parquet")
