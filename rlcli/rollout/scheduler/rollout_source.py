"""The samples of a step: prompts in the cursor's order, of which only groups worth training on are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

from rlcli.config.schema import RunConfig
from rlcli.data.columns import Samples
from rlcli.data.messages import Collected, PartialRollout, PromptTask
from rlcli.data.prompts.dataset_mixture import Cursor, cursor_of
from rlcli.data.prompts.prompt_table import set_of, verifiers_of
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.errors import CheckpointError, RunFailed
from rlcli.rollout.engine import Sampling
from rlcli.rollout.rollout_call import RolloutCall, Slice
from rlcli.rollout.scheduler.dispatcher import OnProgress, collect, gather, run_shares
from rlcli.rollout.scheduler.group_results import judged, judged_groups
from rlcli.rollout.scheduler.groups import (
    UNKNOWN,
    Group,
    PartialGroup,
    Source,
    as_groups,
    as_plain,
    batch_of,
    by_prompt,
    task_of,
)
from rlcli.rollout.scheduler.round_totals import DrawCheck, Rounds
from rlcli.rollout.scheduler.sample_filter import left_out, rewarded
from rlcli.rollout.scheduler.supervised_source import SupervisedSource
from rlcli.rollout.scheduler.verifier_failures import part_weights
from rlcli.rollout.worker_calls import RolloutCalls, RolloutWorkers

NONE = Samples.of([])
SLICE_STEPS = 16
"""Steps of the engines between two looks at what they have finished, if steps are counted."""
SLICE_S = 0.25
"""The same in seconds, if they are not: also how long a weight update waits for the engines, at most."""


def source_of(
    config: RunConfig,
    prompts: TokenizedPrompts,
    workers: RolloutWorkers,
    samples: Path,
    *,
    greedy: bool,
    on_progress: OnProgress,
) -> Source:
    """The source that the config asks for. samples: the folder where workers save theirs, if at all."""
    cursor = cursor_of(prompts.prompts, config)
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

    Bounded staleness: at most `async.staleness` batches are complete or begun beyond the one that is trained on. Where
    generation goes on through weight updates (`RunConfig.in_flight`) it is done in slices: the engines return what they
    have finished and keep the rest, and a step takes the groups that were drawn first. Otherwise it is done in rounds,
    at the end of which the engines are idle.

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

    waiting: groups in the order drawn, complete or not; with the cursor, and what `state` adds, all state between
    steps. save_as: step → where each worker writes its samples, with `{rank}` for
    it to fill in, or empty; rounds after the first add their number. greedy: generate the baselines.
    """

    def __init__(
        self,
        workers: RolloutWorkers,
        prompts: TokenizedPrompts,
        cursor: Cursor,
        config: RunConfig,
        *,
        save_as: Callable[[int], str],
        greedy: bool,
        on_progress: OnProgress,
    ) -> None:
        self.workers, self.prompts, self.cursor, self.config = workers, prompts, cursor, config
        self.save_as, self.greedy, self.on_progress = save_as, greedy, on_progress
        self.waiting: list[Group] = []
        self._rounds = Rounds()
        self._label = self._numbered = 0
        self._sent: set[int] = set()
        self._draws = DrawCheck(cursor.smallest)
        self.part_weights = part_weights(config.algorithm.advantage, verifiers_of(prompts.prompts))

    def take(self, step: int) -> Collected:
        """The samples of step `step`: of `rollout.prompts_per_step` groups, or fewer if the rounds run out.

        Raises RunFailed if no group is good, or if too many verifications fail.
        """
        self._leave_old(step)
        rounds, depth = self._rounds, self._depth(step)
        rounds.phase += 1
        while not self._is_there() and self._goes_on(depth):
            self._generate(step, depth, self._slice())
        good = [group for group in self._first() if group.open is None]
        if not good:
            rules = self.config.dynamic_sampling
            raise RunFailed(
                f"dynamic_sampling.keep = {rules.keep} kept none of the {rounds.dropped} groups of step {step}, in "
                f"{rounds.count} rounds; the mean score of their {rounds.generated} samples is "
                f"{rounds.mean_score:.3g}",
                "a low score means that the data are too hard for the model, a high one too easy: use other data, more "
                "rollout.samples_per_prompt, or dynamic_sampling.keep = all",
            )
        good = good[: self._wanted]
        taken = set(map(id, good))
        self.waiting = [group for group in self.waiting if id(group) not in taken]
        self._rounds = Rounds()
        batch = batch_of(good)
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
            too_old=rounds.too_old,
            carried_over=len(self._complete),
            stale=stale,
            in_flight=sum(group.open is not None for group in self.waiting) if self.config.in_flight else 0,
            aborted=rounds.aborted,
            carried=rounds.carried,
            redrawn=rounds.redrawn,
            drafted=rounds.drafted,
            accepted=rounds.accepted,
            version=rounds.version,
            part_weights=self.part_weights,
            judged=rounds.judged,
            selection=self.cursor.facts(),
        )

    def ahead(self, step: int, is_over: Callable[[], bool]) -> None:
        """While step `step` is trained on, generate for the steps after it. is_over: whether the engines are needed."""
        after, depth = step + 1, self._depth(step, beside=True)
        self._leave_old(after)
        self._rounds.phase += 1
        for slice in self._slices(is_over):
            if not self._goes_on(depth):
                return
            self._generate(after, depth, slice)

    def state(self) -> tuple[dict[str, Any], list[Any]]:
        """All state between two steps besides the cursor, as plain values, and references to the tokens that it names.
        What goes on in the engines does so undisturbed, or a run that resumes would not equal this one."""
        waiting = self._interrupted()
        plain, shards = as_plain(waiting)
        return {"waiting": plain, "rounds": self._rounds.state(), "groups": self._numbered}, shards

    def restore(self, state: Mapping[str, Any], shards: Sequence[Any]) -> None:
        """Restore the result of `state`. Older checkpoints have waiting groups alone."""
        if state.get("ahead"):
            raise CheckpointError(
                "the checkpoint has samples that were generated ahead in the form of an earlier version",
                "resume from one without: any of a run with async.staleness = 0",
            )
        self._end()
        self.waiting = as_groups(state["waiting"], shards)
        self._rounds = Rounds.restored(state["rounds"]) if "rounds" in state else Rounds()
        self._numbered = state.get("groups", 0)

    def drop(self) -> None:
        """Discard what was generated for later steps."""
        self._end()
        if self.config.async_.staleness:
            self.waiting, self._rounds = [], Rounds()

    def _end(self) -> None:
        """Have the engines forget what goes on."""
        if self._sent:
            self.workers.call(RolloutCalls.interrupted_rollout, True)
            self._sent.clear()

    @property
    def begun(self) -> bool:
        """Whether samples of the next step have been generated already."""
        return self._rounds.count > 0

    @property
    def _wanted(self) -> int:
        return self.config.rollout.prompts_per_step

    @property
    def _complete(self) -> list[Group]:
        return [group for group in self.waiting if group.open is None]

    def _first(self) -> list[Group]:
        """The groups that the next step is trained on, if they are complete: those drawn first; between updates that
        wait for all, those of them that are complete."""
        return self.waiting[: self._wanted] if self.config.in_flight else self._complete[: self._wanted]

    def _is_there(self) -> bool:
        first = self._first()
        return len(first) == self._wanted and all(group.open is None for group in first)

    def _depth(self, step: int, *, beside: bool = False) -> int:
        """How many groups may be complete or begun. beside: while the step is trained on, whose groups are taken. So
        in all, accepted + running ≤ (staleness + step) · batch. None is begun that no step would be trained on; and
        none for later steps while a batch is waited for, if an update waits for all that is begun."""
        ahead = self.config.async_.staleness if beside or self.config.in_flight else 0
        left = self.config.train.steps - step
        return self._wanted * (min(ahead, left) if beside else 1 + min(ahead, left))

    def _goes_on(self, depth: int) -> bool:
        """Whether there is something to generate."""
        rules, rounds = self.config.dynamic_sampling, self._rounds
        if not self.config.in_flight:
            return len(self._complete) < depth and rounds.count < rules.max_batches
        return (len(self.waiting) < depth and not self._ran_out()) or len(self._complete) < len(self.waiting)

    def _ran_out(self) -> bool:
        """Whether no more groups may be begun for this step, of those that go on from slice to slice."""
        rules = self.config.dynamic_sampling
        return rules.keep != "all" and self._rounds.groups >= rules.max_batches * self._wanted

    def _leave_old(self, step: int) -> None:
        """Discard complete groups that are too old to be trained on in step `step`, unless they are to be kept."""
        rules = self.config.async_
        if rules.too_old == "keep" or (rules.too_old is None and self.config.rollout.oversample > 1):
            return
        oldest = step - max(1, rules.staleness if self.config.in_flight else rules.staleness - 1)
        fresh = [group for group in self.waiting if group.open is not None or group.step >= oldest]
        self._rounds.too_old += len(self.waiting) - len(fresh)
        self.waiting = fresh

    def _generate(self, step: int, depth: int, slice: Slice | None = None) -> None:
        """One round, up to `depth` groups, which resumes interrupted ones first: complete groups that are worth it stay
        in `waiting`, as do incomplete ones."""
        rollout, rules, rounds = self.config.rollout, self.config.dynamic_sampling, self._rounds
        self._label = step
        open = [group for group in self.waiting if group.open is not None]
        missing = depth - len(self._complete)
        wanted = _times(missing, 1.0 if rules.keep == "all" or slice else rules.oversample)
        started = max(_times(wanted, rollout.oversample), len(open))
        indexes = self.cursor.take(0 if slice and self._ran_out() else started - len(open))
        self._draws.check(indexes)
        self.waiting += [self._drawn(index, step) for index in indexes]
        groups = [group for group in self.waiting if group.open is not None and group.number not in self._sent]
        groups = self._placed(groups) if slice else [replace(one, number=place) for place, one in enumerate(groups)]
        tasks = [task_of(one, one.number, self.prompts, rollout.samples_per_prompt, self.greedy) for one in groups]
        new = iter(groups)
        self.waiting = [one if one.open is None or one.number in self._sent else next(new) for one in self.waiting]
        call = RolloutCall(
            Sampling(rollout.temperature, rollout.max_response_tokens, rollout.top_p),
            self.config.train.seed,
            "train",
            step,
            _of_round(self.save_as(step), rounds.phase if slice else rounds.count + 1),
            truncated=self.config.train.truncated,
            first_group=0 if slice else rounds.groups,
            slice=slice,
        )
        if slice is None:
            collected = self._round(tasks, call, wanted if started > wanted else None)
        else:
            collected = self._of_slice(groups, tasks, call)
        self._add(collected, step, len(tasks))

    def _slice(self) -> Slice | None:
        """Of the generation for a step that is waited for."""
        if not self.config.in_flight:
            return None
        return Slice(steps=SLICE_STEPS) if self.config.counts_steps else Slice(seconds=SLICE_S)

    def _slices(self, is_over: Callable[[], bool]) -> Iterator[Slice | None]:
        """Those beside the training of a step, if there is something to generate."""
        steps = self.config.engine_steps
        if not self.config.in_flight:
            yield from repeat(None)
        elif steps is None:
            while not is_over():
                yield Slice(seconds=SLICE_S)
        else:
            for start in range(0, steps, SLICE_STEPS):
                yield Slice(steps=min(SLICE_STEPS, steps - start))

    def _placed(self, groups: list[Group]) -> list[Group]:
        """New groups, each with a number and the engine that has the least to do, and those of a checkpoint with the
        ones that they had. Each engine gets them in the order drawn, as it did before an interruption."""
        samples, engines = self.config.rollout.samples_per_prompt, self._engines
        loads = [0] * engines
        for group in self.waiting:
            if group.open is not None and group.engine in range(engines):
                loads[group.engine] += samples - len(group.samples)
        placed = []
        for group in groups:
            if group.engine not in range(engines):
                group = replace(group, engine=loads.index(min(loads)))
                loads[group.engine] += samples - len(group.samples)
            if group.number == UNKNOWN:
                group, self._numbered = replace(group, number=self._numbered), self._numbered + 1
            placed.append(group)
        return placed

    @property
    def _engines(self) -> int:
        return len(self.workers) // self.config.rollout.tensor_parallel

    def _round(self, tasks: list[PromptTask], call: RolloutCall, until: int | None) -> Collected:
        """Generate until all groups are complete, or so many."""
        rollout, before = self.config.rollout, self._rounds.asked
        reports = gather(
            self.workers,
            tasks,
            call,
            tensor_parallel=rollout.tensor_parallel,
            slots=rollout.max_concurrent,
            until=until,
            on_progress=lambda done, total: self.on_progress(before + done, before + total),
        )
        return collect(self.workers, reports)

    def _of_slice(self, groups: list[Group], tasks: list[PromptTask], call: RolloutCall) -> Collected:
        """Generate for the duration of a slice. groups, tasks: those that the engines have not begun."""
        rollout, total = self.config.rollout, self._wanted * self.config.rollout.samples_per_prompt
        shares: list[list[PromptTask]] = [[] for _ in range(self._engines)]
        for group, task in zip(groups, tasks, strict=True):
            shares[group.engine].append(task)
        self._sent |= {group.number for group in groups}
        done = self._rounds.asked

        def finished(count: int) -> None:
            nonlocal done
            done += count
            self.on_progress(min(done, total), total)

        reports = run_shares(self.workers, shares, call, finished, tensor_parallel=rollout.tensor_parallel)
        return collect(self.workers, reports)

    def _interrupted(self) -> list[Group]:
        """All waiting groups, with the tokens so far of those that the engines are generating."""
        if not self.config.in_flight:
            return [replace(group, number=UNKNOWN) for group in self.waiting]
        if not self._sent:
            return self.waiting
        collected = collect(self.workers, self.workers.call(RolloutCalls.interrupted_rollout, False))
        rounds, before = self._rounds, (self._rounds.count, self._rounds.version)
        self._add(replace(collected, begun=(), aborted=0), self._label, 0)
        rounds.count, rounds.version = before  # as in a run that takes no checkpoint here
        begun = _by_number(collected.begun)
        return [
            group.grown(NONE, begun[group.number], collected.shards, None)
            if group.open is not None and group.number in begun
            else group
            for group in self.waiting
        ]

    def _drawn(self, index: int, step: int) -> Group:
        """A group without any samples yet."""
        drawn = self._rounds.drawn
        first = drawn[index] * self.config.rollout.samples_per_prompt
        drawn[index] += 1
        rows = self.prompts.prompts
        row = rows[index]
        return Group(NONE, (), None, step, PartialGroup(index, first), set_of(rows, index), row.data_source, row.id)

    def _add(self, collected: Collected, step: int, begun: int) -> None:
        """Add what was generated to the waiting groups, of which those that are complete and no good are dropped."""
        rounds = self._rounds
        open = {group.number: group for group in self.waiting if group.open is not None}
        sources = {number: self.prompts.prompts[group.open.index] for number, group in open.items() if group.open}
        rounds.add(collected, sources, begun, self.config.train.truncated)
        whole_batch = self._wanted * self.config.rollout.samples_per_prompt
        if not self.config.in_flight or rounds.asked >= whole_batch:
            rounds.failures.check(self.config.verifier.max_crash_rate, self.config.environment.max_failure_rate)
        found = {int(own.prompt[0]): own for own in by_prompt(collected.samples)}
        interrupted = _by_number(collected.begun)
        after: dict[int, Group] = {}
        for number in sorted(found.keys() | interrupted.keys() | collected.baselines.keys()):
            group = open[number]
            grown = group.grown(
                found.get(number, NONE),
                interrupted.get(number, ()),
                collected.shards,
                collected.baselines.get(number),
            )
            if group.step < step and not self.config.in_flight:
                rounds.carried += len(set(group.begun) - set(grown.begun))
            after[number] = self._closed(grown)
        whole = [group.number for group in after.values() if group.open is None]
        complete = [after[number] for number in sorted(whole)]
        kept = self._kept(complete)
        rounds.judged += judged_groups(complete, kept, self.config)
        dropped = set(whole) - {group.number for group in kept}
        rounds.dropped += len(dropped)
        self._sent -= set(whole)
        self.waiting = [
            after.get(group.number, group) if group.open is not None else group
            for group in self.waiting
            if group.open is None or group.number not in dropped
        ]

    def _closed(self, group: Group) -> Group:
        """The group, no longer open if nothing is missing."""
        missing = self.config.rollout.samples_per_prompt - len(group.samples)
        if missing or (self.greedy and group.baseline is None):
            return group
        assert group.open is not None
        self.cursor.account(group.open.index, int(group.samples.tokens.sum()), *judged(group.samples, self.config))
        return replace(group, open=None)

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


def _by_number(begun: Iterable[PartialRollout]) -> dict[int, list[PartialRollout]]:
    """Interrupted responses by their group."""
    found: dict[int, list[PartialRollout]] = {}
    for one in begun:
        found.setdefault(one.prompt, []).append(one)
    return found


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
