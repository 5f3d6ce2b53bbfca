"""Generate responses on this worker's engine and verify each one as it finishes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

from rlcli.cluster.process.busy import goes_on_as
from rlcli.cluster.watchdog import progress
from rlcli.data.columns import Samples
from rlcli.data.messages import Collected, PartialRollout, Progress, PromptTask, sample_seed
from rlcli.data.shard import SampleShard, ShardBuilder
from rlcli.data.signature import signature
from rlcli.data.trajectories import Trajectory
from rlcli.environments.gateway.pool import AgentPool
from rlcli.environments.gateway.round import AgentRound
from rlcli.environments.held import Held, Turn
from rlcli.environments.pool import Environments
from rlcli.errors import RunFailed
from rlcli.rollout.call import GREEDY, RolloutCall
from rlcli.rollout.engine import Engine, Generation, GenerationRequest
from rlcli.scoring.expression import rivals_of
from rlcli.scoring.service.client import Scored, ScoringService
from rlcli.types import UNVERIFIED, Sample
from rlcli.workers.roles.batch import FETCH_TIMEOUT_S
from rlcli.workers.roles.conversations import Conversations, turn_seed
from rlcli.workers.roles.sample_writer import PendingSample, Saver, awaited, pending, sent
from rlcli.workers.roles.work_queue import NO_QUEUE, Queue, WorkGrant, WorkQueue, counters

EXCHANGE_STEPS = 8
"""Engine steps between two exchanges with the other engines; a number of steps, not a time, so that workers that share
an engine exchange after the same one."""
IDLE_S = 0.005


class RolloutRole:
    """The engine and the verifiers of one worker. leader: of the ranks that share an engine, the one that verifies and
    keeps the samples; the others only generate in lockstep. thinking: prompts end within an open <think>.
    stop_token_ids: those that end a response, and are not part of its text. conversing: samples are conversations with
    `environments`, which the leader has. ordered: see `Conversations`."""

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
    ) -> None:
        self.rank = rank
        self.environments, self.conversing, self.ordered = environments, conversing, ordered
        self.thinking, self.stop_token_ids = thinking, frozenset(stop_token_ids)
        self.engine = engine
        self.scorer = scorer
        self.version = 0
        self._saver: Saver | None = None
        self._shard: SampleShard | None = None
        self._saving = ThreadPoolExecutor(1, "samples")
        self._saved: Future[None] | None = None
        self.counters = counters()

    def run(
        self, tasks: list[PromptTask], call: RolloutCall, queue: Queue = NO_QUEUE
    ) -> Iterator[Progress | Collected]:
        """Yield progress regularly, and the report last. tasks: those assigned to this engine. queue: shared with other
        engines; its groups are taken as slots become free."""
        started = reported = time.monotonic()
        self.finish_saving()
        round = _Round(self, call)
        work_queue, ends_early = WorkQueue(queue, self.counters), queue.until is not None
        self.engine.begin(call.sampling)
        for task in tasks:
            round.begin(task)
        grant, steps = WorkGrant(done=not queue.tasks and not ends_early), 0
        while not grant.stop and (self.engine.unfinished or round.waiting or not grant.done):
            round.advance()
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
            if time.monotonic() - reported > call.progress_s:
                reported = time.monotonic()
                yield round.progress()
        if grant.stop:
            round.break_off(self.engine.abort())
        generated = time.monotonic()
        goes_on_as("verify")
        report = round.report()
        verified = time.monotonic()
        self._saver, self._shard = round.saver, round.shard
        yield round.progress()
        yield replace(report, generate_s=generated - started, verify_s=verified - generated)

    def save(self, saver: Saver, *, wait: bool) -> None:
        """Save a round's samples, which all have their verdicts. wait: or do it in the background, while this worker
        is idle or trains."""
        self._saved = self._saving.submit(saver.save_rest)
        if wait:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Wait until the samples of the last rollout are on disk. Raises `RunFailed` if they cannot be written."""
        saved, self._saved = self._saved, None
        if saved is not None:
            saved.result()

    def _grant(self, work_queue: WorkQueue, round: _Round, *, counted: bool) -> WorkGrant:
        """The leader's grant for the workers that share its engine; only the leader uses the queue. counted: whether
        `until` groups end the round, each of which counts once it is verified."""
        if self.scorer is None:
            return WorkGrant()
        room = self.engine.slots - self.engine.unfinished
        if round.conversations is not None:
            room = round.conversations.room(self.engine.slots)
        grant = work_queue.exchange(round.newly_verified() if counted else 0, room)
        return replace(grant, done=grant.stop or (grant.done and not (counted and round.unverified)))

    def take_shard(self) -> SampleShard | None:
        """The tokens of the last rollout, returned once. None if nothing was generated."""
        shard, self._shard = self._shard, None
        return shard

    def texts(self, count: int) -> list[dict[str, Any]]:
        """The first `count` samples of the last rollout, as text."""
        self.finish_saving()
        return self._saver.rows[:count] if self._saver else []

    def verify(
        self, task: PromptTask, trajectory: Trajectory, fields: Mapping[str, Any] | None = None
    ) -> Future[Scored]:
        """Future of the policy's last turn as text, and of the verdict on it. fields: others of the request."""
        assert self.scorer is not None
        return self.scorer.submit(
            task.source,
            sent(trajectory),
            self.spare(trajectory),
            {"finish_reason": trajectory.stop_reason or "", "thinking": self.thinking, **(fields or {})},
        )

    def spare(self, trajectory: Trajectory) -> int:
        """How many of the last turn's last tokens are not text."""
        tokens = trajectory.last_turn
        return int(len(tokens) > 0 and int(tokens[-1]) in self.stop_token_ids)


@dataclass(frozen=True)
class _Compared:
    """A response that waits for the others of its group."""

    sample: int
    task: PromptTask
    whole: Trajectory
    fields: Mapping[str, Any]
    scored: Future[Scored] = field(default_factory=Future)


def _passed_on(scored: Future[Scored], verified: Future[Scored]) -> None:
    if verified.cancelled():
        scored.cancel()
    elif error := verified.exception():
        scored.set_exception(error)
    else:
        scored.set_result(verified.result())


class _Round:
    """The results of one call of `RolloutRole.run` so far. saver: of the samples, as text. shard: the tokens, once
    complete."""

    def __init__(self, role: RolloutRole, call: RolloutCall) -> None:
        self.role, self.call = role, call
        self.shard: SampleShard | None = None
        self._leads = role.scorer is not None
        self._asked: list[tuple[PromptTask, int]] = []
        self._verdicts: dict[int, list[Future[Scored]]] = {}
        self._rivals: dict[int, list[_Compared]] = {}
        self._whole: list[int] = []
        self._greedy: dict[int, Future[Scored]] = {}
        self._unrewarded: set[int] = set()  # prompts whose greedy response was cut off, so that its reward is 0
        self._finished: list[tuple[PromptTask, int, Trajectory, Future[Scored], Held | None]] = []
        self._pending: list[PendingSample] = []
        self._begun: list[PartialRollout] = []
        self._builder = ShardBuilder()
        self.saver = Saver(call.save_as, role.rank, call.step, call.truncated)
        self._tokens = self._unreported = 0
        self.conversations: Conversations | AgentRound | None = None
        if isinstance(role.environments, AgentPool):
            self.conversations = AgentRound(role.environments, role.version, ordered=role.ordered)
        elif role.environments is not None:
            self.conversations = Conversations(role.environments, role.version, ordered=role.ordered)
        self.waiting = False
        """Whether a conversation waits for its environment, or its agent."""

    def begin(self, task: PromptTask) -> None:
        """Have the engine generate the missing responses of a group."""
        self._verdicts[task.prompt] = []
        for sample in (*task.indexes, *[GREEDY] * task.greedy):
            seed = self._seed(task, sample)
            if self.role.conversing:
                self._asked.append((task, sample))
                if self.conversations is not None:
                    record = started(task, sample) if sample in task.begun else None
                    self.conversations.open(len(self._asked) - 1, task, record)
                self.waiting = True
                continue
            begun = started(task, sample).tokens[len(task.tokens) :] if sample in task.begun else None
            request = GenerationRequest(len(self._asked), task.tokens, seed, greedy=sample == GREEDY, begun=begun)
            self._asked.append((task, sample))
            self.role.engine.add(request)

    def _seed(self, task: PromptTask, sample: int) -> int:
        step = self.call.step if task.step is None else task.step
        return sample_seed(self.call.seed, self.call.purpose, step, task.source.id, task.first_sample + sample)

    def advance(self) -> None:
        """Give the engine the turns whose environments have answered, and take the conversations that are over. The
        workers that share an engine add the same turns."""
        if not self.role.conversing:
            return
        found = self.conversations.poll() if self.conversations is not None else []
        if found:
            progress()
        turns = [one for one in found if isinstance(one, Turn)]
        waiting = self.conversations is not None and self.conversations.waiting > 0
        turns, self.waiting = self.role.engine.agree((turns, waiting))
        for turn in turns:
            task, sample = self._asked[turn.key]
            seed, greedy = turn_seed(self._seed(task, sample), turn.number), sample == GREEDY
            self.role.engine.add(GenerationRequest(turn.key, turn.tokens, seed, greedy, turn.begun, turn.room))
        for one in found:
            if isinstance(one, Held):
                self._verify(*self._asked[one.key], one.whole, one)

    def finish(self, generation: Generation) -> None:
        """Take a response from the engine, and send it to be verified, or to its environment."""
        self.waiting = self.role.conversing
        if self.conversations is not None:
            self.conversations.drew(generation.key, generation)
        elif self._leads:
            task, sample = self._asked[generation.key]
            self._verify(task, sample, self._continued(task, sample, generation))
        self._tokens += len(generation.tokens)

    def _verify(self, task: PromptTask, sample: int, whole: Trajectory, held: Held | None = None) -> None:
        self._unreported += 1
        if held is not None and held.failure is not None:
            scored: Future[Scored] = Future()
            scored.set_result(Scored("", held.failure))
        else:
            fields = held.fields if held else {}
            compares = rivals_of(task.source.verifier)
            scored = self._compared(task, sample, whole, fields) if compares else self.role.verify(task, whole, fields)
        if task.greedy and sample == GREEDY:
            self._greedy[task.prompt] = scored
            if whole.stop_reason == "length" and self.call.truncated == "zero_reward":
                self._unrewarded.add(task.prompt)
        else:
            self._finished.append((task, sample, whole, scored, held))
        self._verdicts[task.prompt].append(scored)
        if len(self._verdicts[task.prompt]) == task.responses:
            self._whole.append(task.prompt)
            self._compare(task.prompt)

    def _collect(self) -> None:
        """Take the counts and the tokens of what has finished: between the engine's steps that would cost time."""
        for task, sample, whole, scored, held in self._finished:
            row, seed = self._builder.add(whole) if self.call.keep_tokens else None, self._seed(task, sample)
            saved = {"saved_step": self.call.step, "saved_group": self.call.first_group + task.prompt}
            item = pending(task, sample, whole, scored, shard=self.role.rank, row=row, seed=seed, held=held, **saved)
            self._pending.append(item)
            self.saver.wait_for(item)
        self._finished.clear()

    def _compared(self, task: PromptTask, sample: int, whole: Trajectory, fields: Mapping[str, Any]) -> Future[Scored]:
        """Keep a response whose verifier compares it with others until its group is generated."""
        kept = _Compared(sample, task, whole, fields)
        self._rivals.setdefault(task.prompt, []).append(kept)
        return kept.scored

    def _compare(self, prompt: int) -> None:
        """Send the kept responses of a group, each with those that follow it, in a ring."""
        ring = sorted(self._rivals.pop(prompt, ()), key=attrgetter("sample"))
        sent_as = [(sent(one.whole), self.role.spare(one.whole)) for one in ring]
        for place, one in enumerate(ring):
            others = [*sent_as[place + 1 :], *sent_as[:place]][: rivals_of(one.task.source.verifier)]
            verified = self.role.verify(one.task, one.whole, {**one.fields, "rivals": others})
            verified.add_done_callback(partial(_passed_on, one.scored))

    def _continued(self, task: PromptTask, sample: int, generation: Generation) -> Trajectory:
        """The trajectory so far and what was just generated: each token has the log-prob of the policy that drew it."""
        return started(task, sample).extended(
            "policy", generation.tokens, generation.log_probs, self.role.version, generation.finish_reason
        )

    def break_off(self, generations: Sequence[Generation]) -> None:
        """Keep the tokens so far of the responses that the engine aborted."""
        if not self._leads:
            return
        self._tokens += sum(len(generation.tokens) for generation in generations)
        for key, whole in self._so_far(generations):
            if whole.drawn_tokens:
                (task, sample), row, version = self._asked[key], self._builder.add(whole), whole.versions[0]
                assert version is not None, "the engine's version is known"
                partial = PartialRollout(task.prompt, sample, self.role.rank, row, whole.drawn_tokens, version)
                self._begun.append(partial)

    def _so_far(self, generations: Sequence[Generation]) -> Iterator[tuple[int, Trajectory]]:
        if self.role.conversing:
            assert isinstance(self.conversations, Conversations), "no round of agents ends early"
            yield from self.conversations.broken_off(generations)
            return
        for generation in generations:
            yield generation.key, self._continued(*self._asked[generation.key], generation)

    def newly_verified(self) -> int:
        """How many more groups have all their verdicts than at the last call."""
        still = [prompt for prompt in self._whole if not all(v.done() for v in self._verdicts[prompt])]
        found = len(self._whole) - len(still)
        self._whole = still
        if found:
            progress()
        return found

    @property
    def unverified(self) -> int:
        """Groups that are generated and wait for verdicts."""
        return len(self._whole)

    def progress(self) -> Progress:
        """The progress to report now."""
        finished, self._unreported = self._unreported, 0
        self._collect()
        self.saver.save_finished()
        return Progress(finished)

    def report(self) -> Collected:
        """Call once all verdicts are there. The caller fills in the seconds."""
        self._collect()
        later = False  # samples that may stop the run are on disk before it stops, and its workers are killed
        try:
            samples = Samples.of(self._sample(item) for item in self._pending)
            later = self.call.keep_tokens and not samples.is_(*UNVERIFIED).any()
        finally:
            self.role.save(self.saver, wait=not later)
        baselines = {prompt: awaited(scored).verdict for prompt, scored in self._greedy.items()}
        baselines |= {prompt: replace(baselines[prompt], score=0.0) for prompt in self._unrewarded}
        kept = self.call.keep_tokens and (self._pending or self._begun)
        self.shard = self._builder.build() if kept else None
        return Collected(
            samples,
            [],
            generate_s=0.0,
            verify_s=0.0,
            baselines=baselines,
            generated_tokens=self._tokens,
            begun=self._begun,
            version=self.role.version,
            redrawn=self.conversations.redrawn if self.conversations is not None else 0,
        )

    def _sample(self, item: PendingSample) -> Sample:
        _, verdict, checksum = awaited(item.scored)
        if checksum not in (0, item.checksum):
            raise RunFailed(
                f"sample {item.sample.sample} of {item.source.id} has the verdict on another response",
                "please report this with the run's config.toml",
            )
        signed = signature(item.digest, verdict.score) if item.digest else 0
        return replace(item.sample, verdict=verdict, signature=signed)


def started(task: PromptTask, sample: int) -> Trajectory:
    """What there is of a sample before the engine continues it: the prompt, or a response that was aborted."""
    if sample not in task.begun:
        return Trajectory.of_prompt(task.tokens)
    begun = task.begun[sample]
    shard = task.shards[begun.shard]
    if not isinstance(shard, SampleShard):
        import ray

        shard = ray.get(shard, timeout=FETCH_TIMEOUT_S)
    found: Trajectory = shard.row(begun.row)
    return found.dated(begun.version)
