"""Assembly of verified samples from finished trajectories, for any source of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Protocol

from rlcli.cluster.watchdog import progress
from rlcli.data.columns import SampleTable
from rlcli.data.messages import PartialRollout, Progress, PromptTask, RolloutBatch
from rlcli.data.sample_shard import SampleShard, ShardBuilder
from rlcli.data.signature import signature
from rlcli.data.trajectories import Trajectory
from rlcli.environments.finished_conversation import FinishedConversation
from rlcli.errors import RunFailed
from rlcli.rewards.service.scoring_client import Scored
from rlcli.rollout.rollout_arguments import RolloutArguments
from rlcli.rollout.worker.pending_samples import PendingSample, Saver, pending_sample, wait_for_verdict
from rlcli.rollout.worker.sample_request import SampleRequest
from rlcli.rollout.worker.verdicts import GroupVerdicts, Verification
from rlcli.types import UNVERIFIED, Sample


class Save(Protocol):
    """Writes a saver's samples. wait: return once they are on disk."""

    def __call__(self, saver: Saver, *, wait: bool) -> None: ...


class SampleAssembler:
    """Submits finished trajectories to verification, and reports samples with their verdicts and tokens.

    States of a sample: finished (`add`) → pending (waits for its verdict) → reported (`report`). An aborted sample is
    reported with its tokens so far (`add_partial`).
    """

    def __init__(self, verification: Verification | None, rank: int, arguments: RolloutArguments, save: Save) -> None:
        self.arguments = arguments
        """Arguments of the current round or slice."""
        self.verdicts = GroupVerdicts(verification)
        """Verdicts by group."""
        self.saver = Saver(arguments.save_as, rank, arguments.step, arguments.truncated)
        """Writes the samples as text."""
        self.shard: SampleShard | None = None
        """Tokens of the last report."""
        self._rank, self._save = rank, save
        self._finished: list[tuple[SampleRequest, Trajectory, Future[Scored], FinishedConversation | None]] = []
        self._pending: list[PendingSample] = []
        self._partial: list[PartialRollout] = []
        self._builder = ShardBuilder()
        self._greedy: dict[int, Future[Scored]] = {}
        self._truncated_baselines: set[int] = set()  # prompts whose greedy response was truncated: its reward is 0
        self._unreported = 0

    def begin(self, task: PromptTask) -> None:
        """Register a group whose samples will follow."""
        self.verdicts.begin(task)

    def add(
        self, request: SampleRequest, trajectory: Trajectory, conversation: FinishedConversation | None = None
    ) -> None:
        """Submit a finished sample to verification. conversation: of a sample with an environment."""
        task, sample = request.task, request.sample
        self._unreported += 1
        scored = self.verdicts.add(task, sample, trajectory, conversation, request.step)
        if task.greedy and request.is_greedy:
            self._greedy[task.group] = scored
            if trajectory.stop_reason == "length" and self.arguments.truncated == "zero_reward":
                self._truncated_baselines.add(task.group)
        else:
            self._finished.append((request, trajectory, scored, conversation))

    def add_deferred(self) -> None:
        """Report the responses whose verification is deferred as partial ones."""
        for response in self.verdicts.deferred:
            self.add_partial(response.task, response.sample, response.trajectory)

    def add_partial(self, task: PromptTask, sample: int, trajectory: Trajectory) -> None:
        """Report a response's tokens so far."""
        row, version = self._builder.add(trajectory), trajectory.versions[0]
        assert version is not None, "the engine's version is known"
        self._partial.append(PartialRollout(task.group, sample, self._rank, row, trajectory.response_tokens, version))

    def resume(self, arguments: RolloutArguments) -> None:
        """Start the next slice. Its samples go to another file, if the call names one."""
        self.verdicts.newly_verified()
        if arguments.save_as != self.arguments.save_as:
            self._save(self.saver, wait=False)
            self.saver = Saver(arguments.save_as, self._rank, arguments.step, arguments.truncated)
        self.arguments = arguments

    def await_verdicts(self, seconds: float) -> None:
        """Wait at most `seconds` for the verdicts of finished samples."""
        self._collect()
        wait([item.scored for item in self._pending], max(0.0, seconds))
        progress()

    def progress(self) -> Progress:
        """Progress since the last call; saves samples whose verdicts have arrived."""
        finished, self._unreported = self._unreported, 0
        self._collect()
        self.saver.save_finished()
        return Progress(finished)

    def report(self, *, await_all: bool = False) -> RolloutBatch:
        """Report the complete samples that were not reported yet. Waits for their verdicts, unless the slice is limited
        in seconds. await_all: wait in any case. Deferred samples are complete with their group."""
        self._collect()
        slice = self.arguments.slice
        waits = await_all or slice is None or slice.seconds is None
        deferred = {id(response.scored) for response in self.verdicts.deferred}

        def is_reportable(scored: Future[Scored]) -> bool:
            return id(scored) not in deferred and (waits or scored.done())

        complete, pending = list[PendingSample](), list[PendingSample]()
        for item in self._pending:
            (complete if is_reportable(item.scored) else pending).append(item)
        self._pending = pending
        rows = [self._builder.add(item.trajectory) if item.trajectory is not None else 0 for item in complete]
        complete = [replace(item, sample=replace(item.sample, saved_step=self.arguments.step)) for item in complete]
        self.saver.add(complete)
        samples = self._verified(complete, rows)
        greedy = [prompt for prompt, scored in self._greedy.items() if is_reportable(scored)]
        baselines = {prompt: wait_for_verdict(self._greedy.pop(prompt)).verdict for prompt in greedy}
        truncated = baselines.keys() & self._truncated_baselines
        baselines |= {prompt: replace(baselines[prompt], score=0.0) for prompt in truncated}
        partial, self._partial = self._partial, []
        self.shard = self._builder.build() if self.arguments.keep_tokens and (complete or partial) else None
        self._builder = ShardBuilder()
        return RolloutBatch(samples, baselines=baselines, partial=partial)

    def _collect(self) -> None:
        """Turn finished samples into pending ones. Done in batches: between two engine steps it would cost time."""
        for request, trajectory, scored, conversation in self._finished:
            item = pending_sample(
                request.task,
                request.sample,
                trajectory,
                scored,
                shard=self._rank,
                seed=request.seed,
                keep_tokens=self.arguments.keep_tokens,
                saved_group=self.arguments.first_group + request.task.group,
                conversation=conversation,
                keep_copies=self.saver.keeps_copies,
            )
            self._pending.append(item)
            self.saver.wait_for(item)
        self._finished.clear()

    def _verified(self, items: Sequence[PendingSample], rows: Sequence[int]) -> SampleTable:
        """The samples with their verdicts. Samples that may stop the run are on disk when this returns: once it stops,
        its workers are killed."""
        all_verified = False
        try:
            samples = SampleTable.of(_sample_of(item, row) for item, row in zip(items, rows, strict=True))
            all_verified = self.arguments.keep_tokens and not samples.is_(*UNVERIFIED).any()
            return samples
        finally:
            if not all_verified or self.arguments.slice is None:
                self._save(self.saver, wait=not all_verified)


def _sample_of(item: PendingSample, row: int) -> Sample:
    """The sample with its verdict, once that arrives. Raises RunFailed if the verdict is on another response."""
    _, verdict, checksum = wait_for_verdict(item.scored)
    if checksum not in (0, item.checksum):
        raise RunFailed(
            f"sample {item.sample.sample} of {item.prompt.id} has the verdict on another response",
            "please report this with the run's config.toml",
        )
    signed = signature(item.digest, verdict.score) if item.digest else 0
    return replace(item.sample, row=row, verdict=verdict, signature=signed)
