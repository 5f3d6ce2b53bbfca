"""A worker's part in generation: responses of its engine, each verified as it finishes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import count

from rlcli.cluster.process.busy_lanes import rename_current
from rlcli.data.columns import SampleTable
from rlcli.data.messages import Progress, PromptTask, RolloutBatch, sample_seed
from rlcli.data.rollout_stats import RolloutStats
from rlcli.data.sample_files import SampleRow
from rlcli.data.sample_shard import SampleShard
from rlcli.environments.environment_pool import Environments
from rlcli.environments.gateway.agent_pool import AgentPool
from rlcli.environments.gateway.agent_round import AgentRound
from rlcli.images.image_processor import ImageProcessor
from rlcli.rewards.service.scoring_client import ScoringClient
from rlcli.rollout.engine import Engine, Generation, Speculating
from rlcli.rollout.in_flight import InFlight
from rlcli.rollout.rollout_arguments import GREEDY, RolloutArguments, Slice
from rlcli.rollout.worker.assembler import SampleAssembler
from rlcli.rollout.worker.conversations import Conversations
from rlcli.rollout.worker.pending_samples import Saver
from rlcli.rollout.worker.sample_request import SampleRequest
from rlcli.rollout.worker.token_sources import AgentTurns, ConversationTurns, SingleTurns, TokenSource, Turns
from rlcli.rollout.worker.verdicts import Verification
from rlcli.rollout.worker.work_queue import NO_SHARED_TASKS, RoundTasks, WorkGrant, WorkQueue, counters

EXCHANGE_STEPS = 8
"""Engine steps between two exchanges with the other engines: a number of steps, not a time, so that workers that share
an engine exchange after the same step."""
IDLE_S = 0.005
"""Pause while the engine has no request, and verdicts or environments are awaited."""


class RolloutRole:
    """The engine and the verifiers of one worker.

    Of the ranks that share an engine (tensor parallel), the leader verifies and keeps the samples; the others generate
    in lockstep. thinking, stop_token_ids, grouped: see `Verification`.
    """

    def __init__(
        self,
        rank: int,
        engine: Engine,
        scorer: ScoringClient | None,
        *,
        thinking: bool = False,
        stop_token_ids: Sequence[int] = (),
        environments: Environments | AgentPool | None = None,
        conversing: bool = False,
        ordered: bool = False,
        image_processor: ImageProcessor | None = None,
        grouped: Collection[str] = (),
    ) -> None:
        self.rank = rank
        self.image_processor = image_processor
        """Preprocesses the images of prompts, for a model that takes images."""
        self.environments = environments
        """Environments or agents, on the leader."""
        self.conversing = conversing
        """Whether samples are conversations."""
        self.ordered = ordered
        """Whether batches must not depend on the speed of environments."""
        self.engine = engine
        self.scorer = scorer
        """Client of the scoring service; None on workers that do not lead."""
        self.verification = (
            Verification(scorer, thinking, frozenset(stop_token_ids), frozenset(grouped))
            if scorer is not None
            else None
        )
        self.version = 0
        """Policy version of the engine: number of weight syncs."""
        self._saver: Saver | None = None
        self._shard: SampleShard | None = None
        self._saving = ThreadPoolExecutor(1, "samples")
        self._saved: Future[None] | None = None
        self._streaming: RolloutRound | None = None
        self._speculated = (0, 0)
        self.counters = counters()

    def run(
        self, tasks: Sequence[PromptTask], arguments: RolloutArguments, queue: RoundTasks = NO_SHARED_TASKS
    ) -> Iterator[Progress | RolloutBatch]:
        """Generate and verify; yields progress regularly, and the report last. tasks: those assigned to this engine.
        queue: shared with other engines; its groups are taken as slots become free. A call with a slice resumes the
        unfinished requests of the previous one."""
        started = reported = time.monotonic()
        self.finish_saving()
        round = self._start_round(arguments)
        source, assembler = round.source, round.assembler
        work_queue, ends_early = WorkQueue(queue, self.counters), queue.until is not None
        for task in tasks:
            round.begin(task)
        grant, steps, over = WorkGrant(done=not queue.tasks and not ends_early), 0, False
        while not (grant.stop or over) and (self.engine.unfinished or source.is_waiting or not grant.done):
            while not source.advance():
                pass
            if self.engine.unfinished:
                for generation in self.engine.step():
                    round.finish(generation)
            else:
                time.sleep(IDLE_S)
            steps += 1
            exchanges = steps % EXCHANGE_STEPS == 0 or not self.engine.unfinished
            if exchanges and (ends_early or not grant.done):
                grant = self.engine.agree(self._grant(work_queue, round, counted=ends_early))
                for index in grant.take:
                    round.begin(queue.tasks[index])
            over = self._is_over(arguments.slice, steps, started, exchanges)
            if time.monotonic() - reported > arguments.progress_s:
                reported = time.monotonic()
                yield assembler.progress()
        if grant.stop:
            round.pause()
            round.report_partial()
            source.close()
        generated = time.monotonic()
        rename_current("verify")
        if arguments.slice is not None and arguments.slice.seconds is not None and not self.engine.unfinished:
            assembler.await_verdicts(started + arguments.slice.seconds - generated)
        report = round.report()
        verified = time.monotonic()
        self._shard = round.assembler.shard
        yield assembler.progress()
        stats = replace(report.stats, generate_s=generated - started, verify_s=verified - generated)
        yield replace(report, stats=stats)

    def save(self, saver: Saver, *, wait: bool) -> None:
        """Save a round's samples, which all have their verdicts. wait: until they are on disk; else they are saved in
        the background, while this worker is idle or trains."""
        self.finish_saving()
        self._saver, self._saved = saver, self._saving.submit(saver.save_rest)
        if wait:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Wait until the samples of the last rollout are on disk. Raises `RunFailed` if they cannot be written."""
        saved, self._saved = self._saved, None
        if saved is not None:
            saved.result()

    def pause(self, *, keep: bool = False) -> None:
        """Remove the requests of streaming generation from the engine, before the weights change or another generation
        starts. keep: they stay there, with their KV cache."""
        if self._streaming is not None:
            self._streaming.pause(keep=keep)
            self.save(self._streaming.assembler.saver, wait=False)

    def snapshot(self, *, end: bool, keep: bool = False) -> RolloutBatch:
        """Report the complete samples of streaming generation, and the others with their tokens so far (`take_shard`).

        end: discard the requests; later tasks resume from these tokens. keep: as in `pause`.
        """
        round = self._streaming
        if round is None:
            return RolloutBatch(SampleTable.of([]), stats=RolloutStats(version=self.version))
        self.finish_saving()
        round.pause(keep=keep and not end)
        round.report_partial()
        report = round.report(await_all=True)
        self._shard = round.assembler.shard
        self.save(round.assembler.saver, wait=True)
        if end:
            self.discard_streaming()
        return report

    def discard_streaming(self) -> None:
        """Abort and discard the requests of streaming generation."""
        if self._streaming is not None:
            self._streaming.pause()
            self._streaming.source.close()
            self._streaming = None

    def build_source(self, in_flight: InFlight, assembler: SampleAssembler) -> TokenSource:
        """Build the token source of a round."""
        engine, environments = self.engine, self.environments
        if not self.conversing:
            return SingleTurns(engine, in_flight, assembler if self.leads else None)
        if environments is None or not self.leads:
            return Turns(engine, in_flight, None)
        if isinstance(environments, AgentPool):
            agents = AgentRound(environments, self.version, ordered=self.ordered)
            return AgentTurns(engine, in_flight, assembler, agents)
        conversations = Conversations(environments, self.version, ordered=self.ordered)
        return ConversationTurns(engine, in_flight, assembler, conversations, ordered=self.ordered)

    @property
    def leads(self) -> bool:
        """True if this worker verifies and keeps the samples of its engine."""
        return self.scorer is not None

    def _start_round(self, arguments: RolloutArguments) -> RolloutRound:
        """Start the round of a call, or resume the streaming one."""
        if arguments.slice is None:
            self.pause()
            self.engine.begin(arguments.sampling)
            return RolloutRound(self, arguments)
        if self._streaming is None:
            self._streaming = RolloutRound(self, arguments)
        self._streaming.resume(arguments)
        return self._streaming

    def _is_over(self, slice: Slice | None, steps: int, started: float, exchanges: bool) -> bool:
        """True if the slice ends now, for all workers that share the engine."""
        if slice is None:
            return False
        if slice.seconds is None:
            return slice.steps is not None and steps >= slice.steps
        return exchanges and self.engine.agree(time.monotonic() - started >= slice.seconds)

    def _grant(self, work_queue: WorkQueue, round: RolloutRound, *, counted: bool) -> WorkGrant:
        """The next work of the engine, from the shared queue; only the leader asks for it. counted: whether the round
        ends with `until` verified groups."""
        if not self.leads:
            return WorkGrant()
        verdicts = round.assembler.verdicts
        grant = work_queue.exchange(verdicts.newly_verified() if counted else 0, round.source.room())
        return replace(grant, done=grant.stop or (grant.done and not (counted and verdicts.unverified)))

    def take_shard(self) -> SampleShard | None:
        """The tokens of the last rollout, returned once. None if nothing was generated."""
        shard, self._shard = self._shard, None
        return shard

    def speculated(self) -> tuple[int, int]:
        """Drafted and accepted tokens since the last call; 0 if the engine does not speculate, and on workers that do
        not lead."""
        if not self.leads or not isinstance(self.engine, Speculating):
            return 0, 0
        (drafted, accepted), (last_drafted, last_accepted) = self.engine.speculated(), self._speculated
        self._speculated = drafted, accepted
        return drafted - last_drafted, accepted - last_accepted

    def texts(self, count: int) -> list[SampleRow]:
        """The first `count` samples of the last rollout, as text."""
        self.finish_saving()
        return self._saver.rows[:count] if self._saver else []

    def with_images(self, task: PromptTask) -> PromptTask:
        """The task with its images preprocessed: all its samples share them, here and in training."""
        if not task.prompt.images:
            return task
        assert self.image_processor is not None, "refused before the run starts"
        return replace(task, images=self.image_processor.process(task.prompt.images))


class RolloutRound:
    """The generation of one call of `RolloutRole.run`, or of several calls with slices."""

    def __init__(self, role: RolloutRole, arguments: RolloutArguments) -> None:
        self.assembler = SampleAssembler(role.verification, role.rank, arguments, role.save)
        """Verifies and reports finished samples."""
        self._in_flight = InFlight(role.engine)
        self.source = role.build_source(self._in_flight, self.assembler)
        """Adds requests to the engine, and handles its outputs."""
        self._role, self._arguments, self._keys = role, arguments, count()
        self._reported = RolloutStats()

    def begin(self, task: PromptTask) -> None:
        """Start the missing responses of a group on the engine."""
        self.assembler.begin(task)
        task, step = self._role.with_images(task), self._arguments.step if task.step is None else task.step
        for sample in (*task.indexes, *[GREEDY] * task.greedy):
            index = task.first_sample + sample
            seed = sample_seed(self._arguments.seed, self._arguments.purpose, step, task.prompt.id, index)
            self.source.open(next(self._keys), SampleRequest(task, sample, seed, step))

    def finish(self, generation: Generation) -> None:
        """Handle a finished response of the engine: it is verified, or sent to its environment."""
        self.source.add_output(self._in_flight.finished(generation, self._role.version))

    def resume(self, arguments: RolloutArguments) -> None:
        """Start the next slice."""
        self._arguments = arguments
        self.assembler.resume(arguments)
        self.source.set_version(self._role.version)
        if not self._role.engine.unfinished:
            self._role.engine.begin(arguments.sampling)
        for output in self._in_flight.resume():
            self.source.add_output(output)

    def pause(self, *, keep: bool = False) -> None:
        """Record the engine's tokens so far with their policy version. keep: see `InFlight.pause`."""
        self._in_flight.pause(self._role.version, keep=keep)

    def report_partial(self) -> None:
        """Report the tokens so far of the paused responses, besides complete samples."""
        if not self._role.leads:
            return
        if self.source.resumes_finished:
            self.assembler.add_deferred()
        for request, trajectory in self.source.partial(self._in_flight.so_far()):
            if trajectory.response_tokens:
                self.assembler.add_partial(request.task, request.sample, trajectory)

    def report(self, *, await_all: bool = False) -> RolloutBatch:
        """Report complete samples and the counters since the last report, without the seconds, which the caller adds.
        await_all: see `SampleAssembler.report`."""
        report, reported = self.assembler.report(await_all=await_all), self._reported
        drafted, accepted = self._role.speculated()
        tokens, diverged = self._in_flight.tokens, self.source.replay_diverged
        self._reported = RolloutStats(generated_tokens=tokens, replay_diverged=diverged)
        stats = RolloutStats(
            generated_tokens=tokens - reported.generated_tokens,
            replay_diverged=diverged - reported.replay_diverged,
            drafted=drafted,
            accepted=accepted,
            version=self._role.version,
        )
        return replace(report, stats=stats)
