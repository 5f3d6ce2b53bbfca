"""Base class of synchronous and streaming rollouts: drawing prompts, totals of a step, and checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlcli.config.schema import RunConfig
from rlcli.data.messages import PromptTask, RolloutBatch, ShardRef
from rlcli.data.prompts.dataset_mixture import Cursor
from rlcli.data.prompts.prompt_table import dataset_name, verifiers_of
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.errors import CheckpointError, RunFailed
from rlcli.rollout.engine import Sampling
from rlcli.rollout.rollout_arguments import RolloutArguments
from rlcli.rollout.scheduler.dispatcher import OnProgress
from rlcli.rollout.scheduler.group_buffer import GroupBuffer
from rlcli.rollout.scheduler.group_checkpoint import SourceState, groups_from_json, groups_to_json
from rlcli.rollout.scheduler.group_results import correct_and_scored, kept_groups, scored_groups
from rlcli.rollout.scheduler.groups import Group, generation_task, merge_groups
from rlcli.rollout.scheduler.round_totals import DrawCheck, StepTotals
from rlcli.rollout.scheduler.verifier_failures import part_weights
from rlcli.rollout.worker_calls import RolloutWorkers


class Rollouts(ABC):
    """Draws prompts from the cursor, generates and verifies groups on the engines, and returns the groups of each step.

    `SyncRollouts` and `StreamingRollouts` decide when the engines generate and which groups a step takes; `GroupBuffer`
    holds the groups. With the cursor, `state` is all state between two steps.

    Sampling is a function of (seed, step, prompt, sample), for any layout of the workers: if a step draws a prompt
    several times, the sample numbers of the later groups continue (`Group.first_sample`).
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
        self.save_as = save_as
        """Step → file for each worker's samples, with `{rank}` for it to fill in; empty: samples are not saved."""
        self.greedy = greedy
        """Whether to generate greedy baselines."""
        self.on_progress = on_progress
        """Called with the finished and all responses of the step."""
        self.buffer = GroupBuffer(
            config.rollout.samples_per_prompt, greedy, lambda groups: kept_groups(groups, self.config)
        )
        self.totals = StepTotals()
        self.part_weights = part_weights(config.algorithm.advantage, verifiers_of(prompts.prompts))
        self._next_number = 0
        """Number of the next new group, in a streaming run."""
        """Groups that streaming rollouts have numbered."""
        self._draw_check = DrawCheck(cursor.draws_without_repeat)

    @abstractmethod
    def take(self, step: int) -> RolloutBatch:
        """The samples of step `step`: of `rollout.prompts_per_step` groups, or fewer if dynamic sampling keeps fewer in
        `max_batches` rounds. Raises RunFailed if it keeps none, or if too many verifications fail."""

    @abstractmethod
    def prefetch(self, step: int, should_stop: Callable[[], bool]) -> None:
        """While `step` is trained on, generate for later steps. should_stop: true once the engines are needed."""

    @property
    def has_started(self) -> bool:
        """True if samples of the next step have been generated."""
        return self.totals.stats.rounds > 0

    def state(self) -> tuple[SourceState, list[ShardRef]]:
        """All state between two steps besides the cursor, as plain values, and references to the shards of its
        tokens."""
        groups, shards = groups_to_json(self._snapshot())
        return {"waiting": groups, "rounds": self.totals.state(), "groups": self._next_number}, shards

    def restore(self, state: SourceState, shards: Sequence[ShardRef]) -> None:
        """Restore the result of `state`. Older checkpoints have only groups."""
        if state.get("ahead"):
            raise CheckpointError(
                "the checkpoint has samples that were generated ahead in the form of an earlier version",
                "resume from one without: any of a run with async.staleness = 0",
            )
        self._stop_engines()
        self.buffer.restore(groups_from_json(state["waiting"], shards))
        self.totals = StepTotals.restored(state["rounds"]) if "rounds" in state else StepTotals()
        self._next_number = state.get("groups", 0)

    def discard(self) -> None:
        """Discard what was generated for later steps."""
        self._stop_engines()
        if self.config.async_.staleness:
            self.buffer.clear()
            self.totals = StepTotals()

    @abstractmethod
    def _snapshot(self) -> list[Group]:
        """The groups of a checkpoint; running ones have their partial responses."""

    @abstractmethod
    def _stop_engines(self) -> None:
        """Discard the requests that the engines are generating."""

    @property
    def _batch_size(self) -> int:
        """P, groups of a step."""
        return self.config.rollout.prompts_per_step

    @property
    def _engine_count(self) -> int:
        return len(self.workers) // self.config.rollout.tensor_parallel

    def _steps_ahead(self, step: int) -> int:
        """Later steps for which groups may be generated before step `step` ends."""
        return min(self.config.async_.staleness, self.config.train.steps - step)

    def _start_phase(self, step: int, max_age: int) -> None:
        """Start a phase of generation for `step`, of which each weight update begins a new one. max_age: complete
        groups that were drawn more than this many steps ago are dropped, unless `async.too_old` keeps them."""
        rule = self.config.async_.too_old
        if rule == "drop" or (rule is None and self.config.rollout.oversample <= 1):
            expired = self.buffer.expire(step - max_age)
            self.totals.stats = replace(self.totals.stats, too_old=self.totals.stats.too_old + expired)
        self.totals.phase += 1

    def _queue_groups(self, count: int, step: int) -> None:
        """Draw `count` prompts from the cursor, and queue a group of each."""
        indexes = self.cursor.take(count)
        self._draw_check.check(indexes)
        self.buffer.fill([self._new_group(index, step) for index in indexes])

    def _new_group(self, index: int, step: int) -> Group:
        """Create a group of the prompt in row `index`."""
        rows, draws = self.prompts.prompts, self.totals.draws
        first_sample = draws[index] * self.config.rollout.samples_per_prompt
        draws[index] += 1
        row = rows[index]
        return Group(
            step, index, first_sample, source=dataset_name(rows, index), data_source=row.data_source, prompt_id=row.id
        )

    def _generation_task(self, group: Group) -> PromptTask:
        return generation_task(group, self.prompts, self.config.rollout.samples_per_prompt, self.greedy)

    def _arguments(self, step: int) -> RolloutArguments:
        """Arguments of a round for `step`, the same for all workers."""
        rollout, train = self.config.rollout, self.config.train
        sampling = Sampling(rollout.temperature, rollout.max_response_tokens, rollout.top_p)
        return RolloutArguments(sampling, train.seed, "train", step, truncated=train.truncated)

    def _add_report(self, report: RolloutBatch, sent: int) -> None:
        """Add a round's report to the totals and to its groups. sent: number of groups that the engines received."""
        prompts = {group.number: self.prompts.prompts[group.prompt_index] for group in self.buffer.running}
        self.totals.add(report, prompts, sent, self.config.train.truncated)
        finished = self.buffer.finish(report)
        for group in finished:
            tokens = int(group.samples.tokens.sum())
            correct, scored = correct_and_scored(group.samples, self.config)
            self.cursor.record_group(group.prompt_index, tokens, correct, scored)
        selected = [group for group in finished if group.is_complete]
        self.totals.scored_groups += scored_groups(finished, selected, self.config)
        dropped = self.totals.stats.dropped + len(finished) - len(selected)
        self.totals.stats = replace(self.totals.stats, dropped=dropped)

    def _check_failures(self) -> None:
        """Raises RunFailed if too many verifications of the step failed."""
        config = self.config
        self.totals.failures.check(config.verifier.max_crash_rate, config.environment.max_failure_rate)

    def _take_batch(self, step: int, groups: Sequence[Group]) -> RolloutBatch:
        """Take complete groups as the batch of a step, and reset the totals. Raises RunFailed if there are none."""
        stats, rules = self.totals.stats, self.config.dynamic_sampling
        if not groups:
            raise RunFailed(
                f"dynamic_sampling.keep = {rules.keep} kept none of the {stats.dropped} groups of step {step}, in "
                f"{stats.rounds} rounds; the mean score of their {stats.generated} samples is {stats.mean_score:.3g}",
                "a low score means that the data are too hard for the model, a high one too easy: use other data, more "
                "rollout.samples_per_prompt, or dynamic_sampling.keep = all",
            )
        batch = merge_groups(self.buffer.take(groups))
        samples = batch.samples
        stats = replace(
            stats,
            carried_over=len(self.buffer.complete),
            stale=int((samples.version < stats.version).sum()) if stats.rounds else len(samples),
        )
        groups_of_step, self.totals = self.totals.scored_groups, StepTotals()
        return replace(
            batch,
            stats=stats,
            part_weights=self.part_weights,
            scored_groups=groups_of_step,
            selection=self.cursor.metrics(),
        )
