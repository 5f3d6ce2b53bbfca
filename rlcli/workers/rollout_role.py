"""Generate responses on this worker's engine and verify each as it finishes."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.data.samples import write_samples
from rlcli.data.shard import SampleShard, ShardBuilder
from rlcli.rollout.engine import Generation, GenerationRequest, RolloutEngine, Sampling
from rlcli.scoring.pool import ScoringPool
from rlcli.types import Sample, Verdict, VerifyRequest
from rlcli.workers.work import Progress, PromptTask, RolloutReport, sample_seed

PROGRESS_EVERY_S = 0.25
GREEDY = -1
"""In the place of a sample's index: the greedy response to a prompt, which is none of its samples."""


@dataclass(frozen=True)
class RolloutCall:
    """What is asked of every worker alike. purpose, step, seed: what the seeds of the samples derive from. save_as:
    where this worker's samples go, as parquet, with `{rank}` in the name; empty: nowhere."""

    sampling: Sampling
    seed: int
    purpose: str
    step: int
    save_as: str = ""


@dataclass
class _Pending:
    task: PromptTask
    sample: int
    row: int
    text: str
    generation: Generation
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
        asked = [(task, sample) for task in tasks for sample in (*range(task.samples), *[GREEDY] * task.greedy)]
        requests = [
            GenerationRequest(key, task.tokens, self._seed(call, task, sample), greedy=sample == GREEDY)
            for key, (task, sample) in enumerate(asked)
        ]
        greedy: dict[int, Future[Verdict]] = {}
        builder, pending, unsaid = ShardBuilder(), [], 0
        for generation in self.engine.generate(requests, call.sampling):
            if self.scorer is None:
                continue
            task, sample = asked[generation.key]
            text, verdict = self._verify(task, generation)
            if sample == GREEDY:
                greedy[task.prompt] = verdict
            else:
                row = builder.add(task.tokens, generation.tokens, generation.log_probs)
                pending.append(_Pending(task, sample, row, text, generation, verdict))
            unsaid += 1
            if time.monotonic() - said > PROGRESS_EVERY_S:
                yield Progress(unsaid)
                said, unsaid = time.monotonic(), 0
        generated = time.monotonic()
        samples = [self._sample(item) for item in pending]
        baselines = {prompt: verdict.result() for prompt, verdict in greedy.items()}
        verified = time.monotonic()
        yield Progress(unsaid)
        self._texts = [self._record(item, sample) for item, sample in zip(pending, samples, strict=True)]
        if call.save_as and self._texts:
            write_samples(Path(call.save_as.format(rank=self.rank)), call.step, self._texts)
        self._shard = builder.build() if pending else None
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
            response_tokens=len(item.generation.tokens),
            finish_reason=item.generation.finish_reason,
            verdict=item.verdict.result(),
            version=self.version,
        )

    def _record(self, item: _Pending, sample: Sample) -> dict[str, Any]:
        source, log_probs = item.task.source, item.generation.log_probs
        return {
            "prompt_id": source.id,
            "sample": sample.sample,
            "prompt": source.messages[-1]["content"],
            "response": item.text,
            "ground_truth": source.ground_truth,
            "answer": sample.verdict.answer,
            "score": sample.verdict.score,
            "outcome": str(sample.verdict.outcome),
            "detail": sample.verdict.detail,
            "verify_s": sample.verdict.latency_s,
            "prompt_tokens": sample.prompt_tokens,
            "response_tokens": sample.response_tokens,
            "finish_reason": sample.finish_reason,
            "version": sample.version,
            "mean_log_prob": float(log_probs.mean()) if len(log_probs) else None,
        }
