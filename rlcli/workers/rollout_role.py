"""Generate responses on this worker's engine and verify each as it finishes."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.data.samples import LogProbSummary, PartWriter, sample_row, write_samples
from rlcli.data.shard import SampleShard, ShardBuilder
from rlcli.rollout.engine import Generation, GenerationRequest, RolloutEngine, Sampling
from rlcli.scoring.pool import ScoringPool
from rlcli.types import FinishReason, Sample, Verdict, VerifyRequest
from rlcli.workers.samples import Samples
from rlcli.workers.watch import progress
from rlcli.workers.work import Progress, PromptTask, RolloutReport, sample_seed

PROGRESS_EVERY_S = 0.25
GREEDY = -1
"""In the place of a sample's index: the greedy response to a prompt. As a baseline it is none of its samples; among
`PromptTask.wanted` it is one like the others."""


@dataclass(frozen=True)
class RolloutCall:
    """What is asked of every worker alike. purpose, step, seed: what the seeds of the samples derive from. save_as:
    where this worker's samples go, as parquet, with `{rank}` in the name; empty: nowhere. With `{part}` in the name as
    well they go there as they finish, each time in a new part. keep_tokens: the tokens will be asked for."""

    sampling: Sampling
    seed: int
    purpose: str
    step: int
    save_as: str = ""
    keep_tokens: bool = True


@dataclass
class _Pending:
    """A response that is generated, and whose verdict is to come."""

    task: PromptTask
    sample: int
    row: int
    text: str
    tokens: int
    finish_reason: FinishReason
    log_probs: LogProbSummary | None
    verdict: Future[Verdict]


class RolloutRole:
    """The engine and the verifiers of one worker. leader: of the ranks that share an engine, the one that verifies and
    keeps the samples; the others only generate in lockstep."""

    def __init__(self, rank: int, engine: RolloutEngine, scorer: ScoringPool | None, tokenizer: Any) -> None:
        self.rank = rank
        self.engine = engine
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.version = 0
        self._texts: list[dict[str, Any]] = []
        self._shard: SampleShard | None = None

    def run(self, tasks: list[PromptTask], call: RolloutCall) -> Iterator[Progress | RolloutReport]:
        """Yield progress now and then, and the report last."""
        started = said = time.monotonic()
        asked = [(task, sample) for task in tasks for sample in (*task.indexes, *[GREEDY] * task.greedy)]
        requests = [
            GenerationRequest(key, task.tokens, self._seed(call, task, sample), greedy=sample == GREEDY)
            for key, (task, sample) in enumerate(asked)
        ]
        greedy: dict[int, Future[Verdict]] = {}
        builder, pending, unsaid = ShardBuilder(), [], 0
        saver = _Saver(self, call) if self.scorer is not None else None
        for generation in self.engine.generate(requests, call.sampling):
            if saver is None:
                continue
            task, sample = asked[generation.key]
            text, verdict = self._verify(task, generation)
            if task.greedy and sample == GREEDY:
                greedy[task.prompt] = verdict
            else:
                row = builder.add(task.tokens, generation.tokens, generation.log_probs) if call.keep_tokens else 0
                pending.append(_pending(task, sample, row, text, generation, verdict))
                saver.wait_for(pending[-1])
            unsaid += 1
            if time.monotonic() - said > PROGRESS_EVERY_S:
                yield Progress(unsaid)
                said, unsaid = time.monotonic(), 0
                saver.save_finished()
        generated = time.monotonic()
        if saver is not None:
            saver.save_rest()
        samples = Samples.of(self._sample(item) for item in pending)
        baselines = {prompt: _awaited(verdict) for prompt, verdict in greedy.items()}
        verified = time.monotonic()
        yield Progress(unsaid)
        self._texts = [] if saver is None else saver.rows
        self._shard = builder.build() if pending and call.keep_tokens else None
        yield RolloutReport(self.rank, samples, generated - started, verified - generated, baselines)

    def take_shard(self) -> SampleShard | None:
        """The tokens of the last rollout, once: after that they are the caller's. None where nothing was generated."""
        shard, self._shard = self._shard, None
        return shard

    def texts(self, count: int) -> list[dict[str, Any]]:
        """The first `count` samples of the last rollout, as text."""
        return self._texts[:count]

    def _seed(self, call: RolloutCall, task: PromptTask, sample: int) -> int:
        return sample_seed(call.seed, call.purpose, call.step, task.source.id, task.first_sample + sample)

    def _verify(self, task: PromptTask, generation: Generation) -> tuple[str, Future[Verdict]]:
        """The response as text, and its verdict to come."""
        assert self.scorer is not None
        source = task.source
        text = self.tokenizer.decode(generation.tokens.tolist(), skip_special_tokens=True)
        request = VerifyRequest(
            text,
            source.ground_truth,
            source.messages,
            source.data_source,
            source.extra_info,
            array("i", generation.tokens.astype("int32").tobytes()),
        )
        return text, self.scorer.submit(source.verifier, request)

    def _sample(self, item: _Pending) -> Sample:
        return Sample(
            prompt=item.task.prompt,
            sample=item.sample,
            shard=self.rank,
            row=item.row,
            prompt_tokens=len(item.task.tokens),
            response_tokens=item.tokens,
            finish_reason=item.finish_reason,
            verdict=_awaited(item.verdict),
            version=self.version,
        )

    def record(self, item: _Pending) -> dict[str, Any]:
        """The row of a response, once its verdict is there."""
        return sample_row(
            item.task.source,
            item.sample,
            item.text,
            _awaited(item.verdict),
            prompt_tokens=len(item.task.tokens),
            response_tokens=item.tokens,
            finish_reason=item.finish_reason,
            log_probs=item.log_probs,
            version=self.version,
        )


def _awaited(verdict: Future[Verdict]) -> Verdict:
    """A verdict, once it is there: each is progress, however long the queue."""
    there = verdict.result()
    progress()
    return there


def _pending(
    task: PromptTask, sample: int, row: int, text: str, generation: Generation, verdict: Future[Verdict]
) -> _Pending:
    """Without the tokens: an evaluation generates more of them than a worker can hold."""
    summary = LogProbSummary.of(generation.log_probs)
    return _Pending(task, sample, row, text, len(generation.tokens), generation.finish_reason, summary, verdict)


class _Saver:
    """Writes a rollout's samples: in parts as they finish, or all at the end. rows: those that nothing has taken away;
    of samples that went out in parts, none."""

    def __init__(self, role: RolloutRole, call: RolloutCall) -> None:
        path = call.save_as.replace("{rank}", str(role.rank))
        self.rows: list[dict[str, Any]] = []
        self._role, self._step = role, call.step
        self._whole = "" if "{part}" in path else path
        self._parts = PartWriter(path, call.step) if "{part}" in path else None
        self._waiting: list[_Pending] = []

    def wait_for(self, item: _Pending) -> None:
        self._waiting.append(item)

    def save_finished(self) -> None:
        """Where there are parts, save those whose verdict is there."""
        if self._parts is None:
            return
        still = []
        for item in self._waiting:
            if item.verdict.done():
                self._parts.add(self._role.record(item))
            else:
                still.append(item)
        self._waiting = still

    def save_rest(self) -> None:
        """Wait for the verdicts that are missing, and save everything."""
        if self._parts is not None:
            for item in self._waiting:
                self._parts.add(self._role.record(item))
            self._parts.flush()
            return
        self.rows = [self._role.record(item) for item in self._waiting]
        if self._whole and self.rows:
            write_samples(Path(self._whole), self._step, self.rows)
