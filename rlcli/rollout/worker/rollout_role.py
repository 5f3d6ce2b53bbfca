"""Generate responses on this worker's engine and verify each one as it finishes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import count
from typing import Any

from rlcli.cluster.process.busy_lanes import goes_on_as
from rlcli.cluster.watchdog import progress
from rlcli.data.columns import Samples
from rlcli.data.messages import Collected, PartialRollout, Progress, PromptTask, sample_seed
from rlcli.data.sample_shard import FETCH_TIMEOUT_S, SampleShard, ShardBuilder
from rlcli.data.signature import signature
from rlcli.data.trajectories import Trajectory
from rlcli.environments.environment_pool import Environments
from rlcli.environments.finished_conversation import Held, Turn
from rlcli.environments.gateway.agent_pool import AgentPool
from rlcli.environments.gateway.agent_round import AgentRound
from rlcli.errors import RunFailed
from rlcli.images.image_processor import Sight
from rlcli.rewards.service.scoring_client import Scored, ScoringService
from rlcli.rollout.engine import Engine, Generation, GenerationRequest, Speculating
from rlcli.rollout.in_flight import Drawn, InFlight
from rlcli.rollout.rollout_call import GREEDY, RolloutCall, Slice
from rlcli.rollout.worker.conversations import Conversations, turn_seed
from rlcli.rollout.worker.pending_samples import PendingSample, Saver, awaited, pending
from rlcli.rollout.worker.verdicts import GroupVerdicts, Verification
from rlcli.rollout.worker.work_queue import NO_QUEUE, Queue, WorkGrant, WorkQueue, counters
from rlcli.types import UNVERIFIED, Sample

EXCHANGE_STEPS = 8
"""Engine steps between two exchanges with the other engines; a number of steps, not a time, so that workers that share
an engine exchange after the same one."""
IDLE_S = 0.005


class RolloutRole:
    """The engine and the verifiers of one worker. leader: of the ranks that share an engine, the one that verifies and
    keeps the samples; the others only generate in lockstep. thinking, stop_token_ids: see `Verification`. conversing:
    samples are conversations with `environments`, which the leader has. ordered: see `Conversations`. sight: of a model
    that sees pictures. grouped: see `Verification`."""

    def __init__(
        self,
        rank: int,
        engine: Engine,
        scorer: ScoringService | None,
        *,
        thinking: bool = False,
        stop_token_ids: Sequence[int] = (),
        environments: Environments | AgentPool | None = None,
        conversing: bool = False,
        ordered: bool = False,
        sight: Sight | None = None,
        grouped: Collection[str] = (),
    ) -> None:
        self.rank, self.sight = rank, sight
        self.environments, self.conversing, self.ordered = environments, conversing, ordered
        self.engine = engine
        self.scorer = scorer
        self.verification = (
            Verification(scorer, thinking, frozenset(stop_token_ids), frozenset(grouped))
            if scorer is not None
            else None
        )
        self.version = 0
        self._saver: Saver | None = None
        self._shard: SampleShard | None = None
        self._saving = ThreadPoolExecutor(1, "samples")
        self._saved: Future[None] | None = None
        self._going: _Round | None = None
        self._speculated = (0, 0)
        self.counters = counters()

    def run(
        self, tasks: Sequence[PromptTask], call: RolloutCall, queue: Queue = NO_QUEUE
    ) -> Iterator[Progress | Collected]:
        """Yield progress regularly, and the report last. tasks: those assigned to this engine. queue: shared with other
        engines; its groups are taken as slots become free. A call with a slice goes on with what the last one left."""
        started = reported = time.monotonic()
        self.finish_saving()
        round = self._round(call)
        work_queue, ends_early = WorkQueue(queue, self.counters), queue.until is not None
        for task in tasks:
            round.begin(task)
        grant, steps, over = WorkGrant(done=not queue.tasks and not ends_early), 0, False
        while not (grant.stop or over) and (self.engine.unfinished or round.waiting or not grant.done):
            while not round.advance():
                pass
            if self.engine.unfinished:
                for generation in self.engine.step():
                    round.finish(generation)
            else:
                time.sleep(IDLE_S)  # Waiting for verdicts, or for environments.
            steps += 1
            exchanges = steps % EXCHANGE_STEPS == 0 or not self.engine.unfinished
            if exchanges and (ends_early or not grant.done):
                grant = self.engine.agree(self._grant(work_queue, round, counted=ends_early))
                for place in grant.take:
                    round.begin(queue.tasks[place])
            over = self._is_over(call.slice, steps, started, exchanges)
            if time.monotonic() - reported > call.progress_s:
                reported = time.monotonic()
                yield round.progress()
        if grant.stop:
            round.pause()
            round.break_off()
            round.close()
        generated = time.monotonic()
        goes_on_as("verify")
        if call.slice is not None and call.slice.seconds is not None and not self.engine.unfinished:
            round.await_verdicts(started + call.slice.seconds - generated)
        report = round.report()
        verified = time.monotonic()
        self._shard = round.shard
        yield round.progress()
        yield replace(report, generate_s=generated - started, verify_s=verified - generated)

    def save(self, saver: Saver, *, wait: bool) -> None:
        """Save a round's samples, which all have their verdicts. wait: or do it in the background, while this worker
        is idle or trains."""
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
        """Before the weights change, or another generation begins: what goes on from slice to slice leaves the engine.
        keep: it stays there, with its keys and values."""
        if self._going is not None:
            self._going.pause(keep=keep)
            self.save(self._going.saver, wait=False)

    def interrupted(self, *, end: bool, keep: bool = False) -> Collected:
        """All that the generation in slices has: what is complete, and the tokens so far of the rest (`take_shard`).
        end: forget it; a later task goes on with these tokens. keep: as in `pause`."""
        round = self._going
        if round is None:
            return Collected(Samples.of([]), [], 0.0, 0.0, version=self.version)
        self.finish_saving()
        round.pause(keep=keep and not end)
        round.break_off()
        report = round.report(settled=True)
        self._shard = round.shard
        self.save(round.saver, wait=True)
        if end:
            self.forget()
        return report

    def forget(self) -> None:
        """Free the engine of the generation in slices, which does not go on."""
        if self._going is not None:
            self._going.pause()
            self._going.close()
            self._going = None

    def _round(self, call: RolloutCall) -> _Round:
        """The generation that this call begins, or goes on with."""
        if call.slice is None:
            self.pause()
            self.engine.begin(call.sampling)
            return _Round(self, call)
        if self._going is None:
            self._going = _Round(self, call)
        self._going.go_on(call)
        return self._going

    def _is_over(self, slice: Slice | None, steps: int, started: float, exchanges: bool) -> bool:
        """Whether the slice ends now, for all workers that share the engine."""
        if slice is None:
            return False
        if slice.seconds is None:
            return slice.steps is not None and steps >= slice.steps
        return exchanges and self.engine.agree(time.monotonic() - started >= slice.seconds)

    def _grant(self, work_queue: WorkQueue, round: _Round, *, counted: bool) -> WorkGrant:
        """The leader's grant for the workers that share its engine; only the leader uses the queue. counted: whether
        `until` groups end the round, each of which counts once it is verified."""
        if self.scorer is None:
            return WorkGrant()
        room = self.engine.slots - self.engine.unfinished
        if round.conversations is not None:
            room = round.conversations.room(self.engine.slots)
        grant = work_queue.exchange(round.verdicts.newly_verified() if counted else 0, room)
        return replace(grant, done=grant.stop or (grant.done and not (counted and round.verdicts.unverified)))

    def take_shard(self) -> SampleShard | None:
        """The tokens of the last rollout, returned once. None if nothing was generated."""
        shard, self._shard = self._shard, None
        return shard

    def speculated(self) -> tuple[int, int]:
        """Drafted and accepted tokens since the last call; none if this engine does not speculate, or another worker
        that shares it reports them."""
        if self.scorer is None or not isinstance(self.engine, Speculating):
            return 0, 0
        now, before = self.engine.speculated(), self._speculated
        self._speculated = now
        return now[0] - before[0], now[1] - before[1]

    def texts(self, count: int) -> list[dict[str, Any]]:
        """The first `count` samples of the last rollout, as text."""
        self.finish_saving()
        return self._saver.rows[:count] if self._saver else []

    def seeing(self, task: PromptTask) -> PromptTask:
        """The task with its pictures as the model sees them: its samples, here and where they are trained on, share
        these."""
        if not task.source.images:
            return task
        assert self.sight is not None, "refused before the run starts"
        return replace(task, pictures=self.sight.prepared(task.source.images))


class _Round:
    """A generation, of one call of `RolloutRole.run` or of several with slices, and its results that are not reported
    yet. saver: of the samples, as text. shard: the tokens of the last report."""

    def __init__(self, role: RolloutRole, call: RolloutCall) -> None:
        self.role, self.call = role, call
        self.shard: SampleShard | None = None
        self._leads = role.scorer is not None
        self._keys = count()
        self._asked: dict[int, tuple[PromptTask, int]] = {}
        self._in_flight = InFlight(role.engine)
        self._turns: list[Turn] = []
        self.verdicts = GroupVerdicts(role.verification)
        self._greedy: dict[int, Future[Scored]] = {}
        self._unrewarded: set[int] = set()  # prompts whose greedy response was cut off, so that its reward is 0
        self._finished: list[tuple[PromptTask, int, Trajectory, Future[Scored], Held | None]] = []
        self._pending: list[PendingSample] = []
        self._begun: list[PartialRollout] = []
        self._builder = ShardBuilder()
        self.saver = Saver(call.save_as, role.rank, call.step, call.truncated)
        self._reported, self._unreported = (0, 0), 0
        self.conversations: Conversations | AgentRound | None = None
        if isinstance(role.environments, AgentPool):
            self.conversations = AgentRound(role.environments, role.version, ordered=role.ordered)
        elif role.environments is not None:
            self.conversations = Conversations(role.environments, role.version, ordered=role.ordered)
        self.waiting = False
        """Whether a conversation waits for its environment, or its agent."""

    def begin(self, task: PromptTask) -> None:
        """Have the engine generate the missing responses of a group."""
        self.verdicts.begin(task)
        task = self.role.seeing(task)
        for sample in (*task.indexes, *[GREEDY] * task.greedy):
            key, seed = next(self._keys), self._seed(task, sample)
            self._asked[key] = task, sample
            if self.role.conversing:
                if self.conversations is not None:
                    record = started(task, sample) if sample in task.begun else None
                    self.conversations.open(key, task, record)
                self.waiting = True
                continue
            whole = started(task, sample)
            if whole.stop_reason is not None:  # it waited for others of its group
                del self._asked[key]
                if self._leads:
                    self._verify(task, sample, whole)
                continue
            begun = whole.tokens[len(task.tokens) :] if sample in task.begun else None
            self._in_flight.add(
                GenerationRequest(key, task.tokens, seed, greedy=sample == GREEDY, begun=begun, pictures=task.pictures)
            )

    def _seed(self, task: PromptTask, sample: int) -> int:
        step = self.call.step if task.step is None else task.step
        return sample_seed(self.call.seed, self.call.purpose, step, task.source.id, task.first_sample + sample)

    def advance(self) -> bool:
        """Give the engine the turns whose environments have answered, and take the conversations that are over. The
        workers that share an engine add the same turns. Returns whether the engine may go on: not while conversations
        are said again, if what it computes together must not depend on that."""
        if not self.role.conversing:
            return True
        found = self.conversations.poll() if self.conversations is not None else []
        if found:
            progress()
        turns = [one for one in found if isinstance(one, Turn)]
        waiting = self.conversations is not None and self.conversations.waiting > 0
        holds = self.role.ordered and isinstance(self.conversations, Conversations) and self.conversations.replaying
        turns, self.waiting, holds = self.role.engine.agree((turns, waiting, holds))
        self._turns += turns
        if not holds:
            self._add_turns()
        for one in found:
            if isinstance(one, Held):
                self._verify(*self._asked.pop(one.key), one.whole, one)
        return not holds

    def _add_turns(self) -> None:
        """First those that go on, as in a run that was not interrupted."""
        turns, self._turns = sorted(self._turns, key=lambda turn: (turn.begun is None, turn.key)), []
        for turn in turns:
            task, sample = self._asked[turn.key]
            seed, greedy = turn_seed(self._seed(task, sample), turn.number), sample == GREEDY
            given = turn.tokens, seed, greedy, turn.begun, turn.room
            self._in_flight.add(GenerationRequest(turn.key, *given, conversation=turn.key, pictures=turn.pictures))

    def finish(self, generation: Generation) -> None:
        """Take a response from the engine, and send it to be verified, or to its environment."""
        self._drew(self._in_flight.finished(generation, self.role.version))

    def _drew(self, drawn: Drawn) -> None:
        self.waiting = self.role.conversing
        if self.conversations is not None:
            self.conversations.drew(drawn.key, drawn)
        elif not self.role.conversing:
            task, sample = self._asked.pop(drawn.key)
            if self._leads:
                self._verify(task, sample, drawn.after(started(task, sample)))

    def _verify(self, task: PromptTask, sample: int, whole: Trajectory, held: Held | None = None) -> None:
        self._unreported += 1
        step = self.call.step if task.step is None else task.step
        scored = self.verdicts.add(task, sample, whole, held, step)
        if task.greedy and sample == GREEDY:
            self._greedy[task.prompt] = scored
            if whole.stop_reason == "length" and self.call.truncated == "zero_reward":
                self._unrewarded.add(task.prompt)
        else:
            self._finished.append((task, sample, whole, scored, held))

    def _collect(self) -> None:
        """Take the counts of what has finished: between the engine's steps that would cost time."""
        for task, sample, whole, scored, held in self._finished:
            item = pending(
                task,
                sample,
                whole,
                scored,
                shard=self.role.rank,
                seed=self._seed(task, sample),
                keep_tokens=self.call.keep_tokens,
                saved_group=self.call.first_group + task.prompt,
                held=held,
                keep_copies=self.saver.keeps_copies,
            )
            self._pending.append(item)
            self.saver.wait_for(item)
        self._finished.clear()

    def go_on(self, call: RolloutCall) -> None:
        """Begin the next slice."""
        self.verdicts.newly_verified()
        if call.save_as != self.call.save_as:
            self.role.save(self.saver, wait=False)
            self.saver = Saver(call.save_as, self.role.rank, call.step, call.truncated)
        self.call = call
        if self.conversations is not None:
            self.conversations.version = self.role.version
        if not self.role.engine.unfinished:
            self.role.engine.begin(call.sampling)
        for drawn in self._in_flight.resume():
            self._drew(drawn)

    def pause(self, *, keep: bool = False) -> None:
        """Record what the engine has drawn so far, and with which weights. keep: see `InFlight.pause`."""
        self._in_flight.pause(self.role.version, keep=keep)

    def break_off(self) -> None:
        """Report the tokens so far of the responses that were paused, besides what is complete."""
        drawn = self._in_flight.so_far()
        found: Iterable[tuple[int, Trajectory]]
        if not self._leads:
            return
        if isinstance(self.conversations, Conversations):
            found = self.conversations.so_far(drawn)
        else:
            assert not self.role.conversing, "no agent is interrupted"
            found = ((key, one.after(started(*self._asked[key]))) for key, one in drawn.items())
            for one in self.verdicts.waiting:
                self._begin_later(one.task, one.sample, one.whole)
        for key, whole in found:
            if whole.drawn_tokens:
                self._begin_later(*self._asked[key], whole)

    def _begin_later(self, task: PromptTask, sample: int, whole: Trajectory) -> None:
        """Report the tokens so far of a response."""
        row, version = self._builder.add(whole), whole.versions[0]
        assert version is not None, "the engine's version is known"
        self._begun.append(PartialRollout(task.prompt, sample, self.role.rank, row, whole.drawn_tokens, version))

    def close(self) -> None:
        """End the conversations that are not over."""
        if isinstance(self.conversations, Conversations):
            self.conversations.close()

    def await_verdicts(self, seconds: float) -> None:
        """Wait at most so long for the verdicts on what is generated."""
        self._collect()
        wait([item.scored for item in self._pending], max(0.0, seconds))
        progress()

    def progress(self) -> Progress:
        """The progress to report now."""
        finished, self._unreported = self._unreported, 0
        self._collect()
        self.saver.save_finished()
        return Progress(finished)

    def report(self, *, settled: bool = False) -> Collected:
        """What is complete and not reported yet. Waits for its verdicts, unless the slice is one of seconds. settled:
        wait all the same. What waits to be compared is complete with its group. The caller fills in the seconds."""
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
        samples = self._sampled(due, rows)
        greedy = [prompt for prompt, scored in self._greedy.items() if is_due(scored)]
        baselines = {prompt: awaited(self._greedy.pop(prompt)).verdict for prompt in greedy}
        baselines |= {p: replace(verdict, score=0.0) for p, verdict in baselines.items() if p in self._unrewarded}
        begun, self._begun = self._begun, []
        self.shard = self._builder.build() if self.call.keep_tokens and (due or begun) else None
        self._builder = ShardBuilder()
        tokens, redrawn = self._in_flight.tokens, self.conversations.redrawn if self.conversations is not None else 0
        before, self._reported = self._reported, (tokens, redrawn)
        drafted, accepted = self.role.speculated()
        return Collected(
            samples,
            [],
            generate_s=0.0,
            verify_s=0.0,
            baselines=baselines,
            generated_tokens=tokens - before[0],
            begun=begun,
            version=self.role.version,
            redrawn=redrawn - before[1],
            drafted=drafted,
            accepted=accepted,
        )

    def _sampled(self, items: Sequence[PendingSample], rows: Sequence[int]) -> Samples:
        """With their verdicts. What may stop the run is on disk before it stops: its workers are killed then."""
        sure = False
        try:
            samples = Samples.of(self._sample(item, row) for item, row in zip(items, rows, strict=True))
            sure = self.call.keep_tokens and not samples.is_(*UNVERIFIED).any()
            return samples
        finally:
            if not sure or self.call.slice is None:
                self.role.save(self.saver, wait=not sure)

    def _sample(self, item: PendingSample, row: int) -> Sample:
        _, verdict, checksum = awaited(item.scored)
        if checksum not in (0, item.checksum):
            raise RunFailed(
                f"sample {item.sample.sample} of {item.source.id} has the verdict on another response",
                "please report this with the run's config.toml",
            )
        signed = signature(item.digest, verdict.score) if item.digest else 0
        return replace(item.sample, row=row, verdict=verdict, signature=signed)


def started(task: PromptTask, sample: int) -> Trajectory:
    """What there is of a sample before the engine continues it: the prompt, or a response that was aborted."""
    if sample not in task.begun:
        return Trajectory.of_prompt(task.tokens, task.pictures)
    begun = task.begun[sample]
    shard = task.shards[begun.shard]
    if not isinstance(shard, SampleShard):
        import ray

        shard = ray.get(shard, timeout=FETCH_TIMEOUT_S)
    found: Trajectory = shard.row(begun.row)
    return found.dated(begun.version)
