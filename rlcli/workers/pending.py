"""Responses that are generated and whose verdicts are to come, and the files that they are written to."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlcli.data.samples import LogProbSummary, PartWriter, sample_row, write_samples
from rlcli.rollout.engine import Generation
from rlcli.scoring.client import Scored
from rlcli.types import FinishReason
from rlcli.workers.samples import TruncatedRule, exclusion
from rlcli.workers.watch import progress
from rlcli.workers.work import PromptTask


@dataclass
class Pending:
    """A response that is generated, and whose verdict is to come. seed: that it was drawn with. digest: of its tokens
    (`rlcli.data.signature.tokens_digest`); 0 where they are not kept. checksum: of its tokens, as `Scored` has it."""

    task: PromptTask
    sample: int
    row: int
    tokens: int
    finish_reason: FinishReason
    log_probs: LogProbSummary | None
    scored: Future[Scored]
    version: int
    seed: int = 0
    digest: int = 0
    checksum: int = 0


def awaited(scored: Future[Scored]) -> Scored:
    """A verdict, once it is there: each is progress, however long the queue."""
    there = scored.result()
    progress()
    return there


def pending(
    task: PromptTask, sample: int, row: int, generation: Generation, scored: Future[Scored], version: int
) -> Pending:
    """Without the tokens: an evaluation generates more of them than a worker can hold."""
    assert generation.finish_reason is not None, "a response that is not over"
    summary, tokens = LogProbSummary.of(generation.log_probs), len(generation.tokens)
    return Pending(task, sample, row, tokens, generation.finish_reason, summary, scored, version)


def _record(item: Pending, rule: TruncatedRule | Literal[""]) -> dict[str, Any]:
    """The row of a response, once its verdict is there."""
    text, verdict, _ = awaited(item.scored)
    left_out = exclusion(verdict.outcome, item.finish_reason == "length", rule) if rule else ""
    return sample_row(
        item.task.source,
        item.sample,
        text,
        verdict,
        prompt_tokens=len(item.task.tokens),
        response_tokens=item.tokens,
        finish_reason=item.finish_reason,
        log_probs=item.log_probs,
        version=item.version,
        left_out=left_out,
    )


class Saver:
    """Writes a rollout's samples: in parts as they finish, or all at the end. rows: those that nothing has taken away;
    of samples that went out in parts, none. save_as, truncated: as `RolloutCall` has them."""

    def __init__(self, save_as: str, rank: int, step: int, truncated: TruncatedRule | Literal[""] = "") -> None:
        path = save_as.replace("{rank}", str(rank))
        self.rows: list[dict[str, Any]] = []
        self._step, self._truncated = step, truncated
        self._whole = "" if "{part}" in path else path
        self._parts = PartWriter(path, step) if "{part}" in path else None
        self._waiting: list[Pending] = []

    def wait_for(self, item: Pending) -> None:
        self._waiting.append(item)

    def save_finished(self) -> None:
        """Where there are parts, save those whose verdict is there."""
        if self._parts is None:
            return
        still = []
        for item in self._waiting:
            if item.scored.done():
                self._parts.add(_record(item, self._truncated))
            else:
                still.append(item)
        self._waiting = still

    def save_rest(self) -> None:
        """Wait for the verdicts that are missing, and save everything."""
        if self._parts is not None:
            for item in self._waiting:
                self._parts.add(_record(item, self._truncated))
            self._parts.flush()
            return
        self.rows = [_record(item, self._truncated) for item in self._waiting]
        if self._whole and self.rows:
            write_samples(Path(self._whole), self._step, self.rows)
