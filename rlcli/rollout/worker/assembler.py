"""From finished trajectories to verified samples, whatever the source of their tokens."""

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
from rlcli.rollout.rollout_call import RolloutCall
from rlcli.rollout.worker.pending_samples import PendingSample, Saver, awaited, pending
from rlcli.rollout.worker.sample_request import SampleRequest
from rlcli.rollout.worker.verdicts import GroupVerdicts, Verification
from rlcli.types import UNVERIFIED, Sample


class Save(Protocol):
    """Writes a saver's samples. wait: until they are on disk."""

    def __call__(self, saver: Saver, *, wait: bool) -> None: ...


class SampleAssembler:
    """Has finished trajectories verified, and reports samples with their verdicts and tokens.

    A sample is, in this order: finished (`add`), pending (it waits for its verdict), reported (`report`). An aborted
    one is reported with its tokens so far (`add_partial`).
    """

    def __init__(self, verification: Verification | None, rank: int, call: RolloutCall, save: Save) -> None:
        self.call = call
        """Arguments of the current round or slice."""
        self.verdicts = GroupVerdicts(verification)
        self.saver = Saver(call.save_as, rank, call.step, call.truncated)
        """Writes the samples as text."""
        self.shard: SampleShard | None = None
        """Tokens of the last report."""
        self._rank, self._save = rank, save
        self._finished: list[tuple[SampleRequest, Trajectory, Future[Scored], FinishedConversation | None]] = []
        self._pending: list[PendingSample] = []
        self._partial: list[PartialRollout] = []
        self._builder = ShardBuilder()
        self._greedy: dict[int, Future[Scored]] = {}
        self._cut_baselines: set[int] = set()  # prompts whose greedy response was cut off, so that its reward is 0
        self._unreported = 0

    def begin(self, task: PromptTask) -> None:
        """Samples of a group will come."""
        self.verdicts.begin(task)

    def add(self, request: SampleRequest, whole: Trajectory, held: FinishedConversation | None = None) -> None:
        """Have a finished sample verified. held: its conversation, if it was one."""
        task, sample = request.task, request.sample
        self._unreported += 1
        scored = self.verdicts.add(task, sample, whole, held, request.step)
        if task.greedy and request.is_greedy:
            self._greedy[task.prompt] = scored
            if whole.stop_reason == "length" and self.call.truncated == "zero_reward":
                self._cut_baselines.add(task.prompt)
        else:
            self._finished.append((request, whole, scored, held))

    def add_compared(self) -> None:
        """Report the finished responses that wait for others of their group as partial ones."""
        for one in self.verdicts.waiting:
            self.add_partial(one.task, one.sample, one.whole)

    def add_partial(self, task: PromptTask, sample: int, whole: Trajectory) -> None:
        """Report the tokens so far of a response."""
        row, version = self._builder.add(whole), whole.versions[0]
        assert version is not None, "the engine's version is known"
        self._partial.append(PartialRollout(task.prompt, sample, self._rank, row, whole.drawn_tokens, version))

    def resume(self, call: RolloutCall) -> None:
        """The next slice begins. Its samples go to another file, if the call names one."""
        self.verdicts.newly_verified()
        if call.save_as != self.call.save_as:
            self._save(self.saver, wait=False)
            self.saver = Saver(call.save_as, self._rank, call.step, call.truncated)
        self.call = call

    def await_verdicts(self, seconds: float) -> None:
        """Wait at most `seconds` for the verdicts on what is generated."""
        self._collect()
        wait([item.scored for item in self._pending], max(0.0, seconds))
        progress()

    def progress(self) -> Progress:
        """The progress to report now."""
        finished, self._unreported = self._unreported, 0
        self._collect()
        self.saver.save_finished()
        return Progress(finished)

    def report(self, *, settled: bool = False) -> RolloutBatch:
        """What is complete and not reported yet. Waits for its verdicts, unless the slice is one of seconds. settled:
        wait all the same. What waits to be compared is complete with its group."""
        self._collect()
        slice = self.call.slice
        waits = settled or slice is None or slice.seconds is None
        compared = {id(one.scored) for one in self.verdicts.waiting}

        def is_due(scored: Future[Scored]) -> bool:
            return id(scored) not in compared and (waits or scored.done())

        due, later = list[PendingSample](), list[PendingSample]()
        for item in self._pending:
            (due if is_due(item.scored) else later).append(item)
        self._pending = later
        rows = [self._builder.add(item.whole) if item.whole is not None else 0 for item in due]
        due = [replace(item, sample=replace(item.sample, saved_step=self.call.step)) for item in due]
        self.saver.add(due)
        samples = self._verified(due, rows)
        greedy = [prompt for prompt, scored in self._greedy.items() if is_due(scored)]
        baselines = {prompt: awaited(self._greedy.pop(prompt)).verdict for prompt in greedy}
        baselines |= {p: replace(verdict, score=0.0) for p, verdict in baselines.items() if p in self._cut_baselines}
        partial, self._partial = self._partial, []
        self.shard = self._builder.build() if self.call.keep_tokens and (due or partial) else None
        self._builder = ShardBuilder()
        return RolloutBatch(samples, baselines=baselines, partial=partial)

    def _collect(self) -> None:
        """Take the counts of what has finished: between the engine's steps that would cost time."""
        for request, whole, scored, held in self._finished:
            item = pending(
                request.task,
                request.sample,
                whole,
                scored,
                shard=self._rank,
                seed=request.seed,
                keep_tokens=self.call.keep_tokens,
                saved_group=self.call.first_group + request.task.prompt,
                held=held,
                keep_copies=self.saver.keeps_copies,
            )
            self._pending.append(item)
            self.saver.wait_for(item)
        self._finished.clear()

    def _verified(self, items: Sequence[PendingSample], rows: Sequence[int]) -> SampleTable:
        """With their verdicts. What may stop the run is on disk before it stops: its workers are killed then."""
        is_sure = False
        try:
            samples = SampleTable.of(_sample_of(item, row) for item, row in zip(items, rows, strict=True))
            is_sure = self.call.keep_tokens and not samples.is_(*UNVERIFIED).any()
            return samples
        finally:
            if not is_sure or self.call.slice is None:
                self._save(self.saver, wait=not is_sure)


def _sample_of(item: PendingSample, row: int) -> Sample:
    """Waits for its verdict. Raises RunFailed if that is of another response."""
    _, verdict, checksum = awaited(item.scored)
    if checksum not in (0, item.checksum):
        raise RunFailed(
            f"sample {item.sample.sample} of {item.source.id} has the verdict on another response",
            "please report this with the run's config.toml",
        )
    signed = signature(item.digest, verdict.score) if item.digest else 0
    return replace(item.sample, row=row, verdict=verdict, signature=signed)
