"""Generated responses that wait for their verdicts, and the files that they are written to."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlcli.cluster.watchdog import progress
from rlcli.data.columns import TruncatedRule, exclusion
from rlcli.data.messages import PromptTask
from rlcli.data.samples import LogProbSummary, PartWriter, sample_row, write_samples
from rlcli.rollout.engine import Generation
from rlcli.scoring.service.client import Scored
from rlcli.types import FinishReason


@dataclass
class PendingSample:
    """A generated response that waits for its verdict. seed: that it was drawn with. digest: of its tokens
    (`rlcli.data.signature.tokens_digest`); 0 if they are not kept. checksum: of its tokens, as in `Scored`."""

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
    """Wait for a verdict: each one is progress for the watchdog, however long the queue."""
    there = scored.result()
    progress()
    return there


def pending(
    task: PromptTask, sample: int, row: int, generation: Generation, scored: Future[Scored], version: int
) -> PendingSample:
    """Without the tokens: an evaluation generates more of them than fit in a worker's memory."""
    assert generation.finish_reason is not None, "the response is not finished"
    summary, tokens = LogProbSummary.of(generation.log_probs), len(generation.tokens)
    return PendingSample(task, sample, row, tokens, generation.finish_reason, summary, scored, version)


def _record(item: PendingSample, rule: TruncatedRule | Literal[""]) -> dict[str, Any]:
    """The row of a response, once it has a verdict."""
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
    """Writes a rollout's samples: in parts as they finish, or all at the end. rows: those not written in parts.
    save_as, truncated: as in `RolloutCall`."""

    def __init__(self, save_as: str, rank: int, step: int, truncated: TruncatedRule | Literal[""] = "") -> None:
        path = save_as.replace("{rank}", str(rank))
        self.rows: list[dict[str, Any]] = []
        self._step, self._truncated = step, truncated
        self._whole = "" if "{part}" in path else path
        self._parts = PartWriter(path, step) if "{part}" in path else None
        self._waiting: list[PendingSample] = []

    def wait_for(self, item: PendingSample) -> None:
        self._waiting.append(item)

    def save_finished(self) -> None:
        """If samples are saved in parts, save those with a verdict."""
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
        """Wait for the missing verdicts, and save everything."""
        if self._parts is not None:
            for item in self._waiting:
                self._parts.add(_record(item, self._truncated))
            self._parts.flush()
            return
        self.rows = [_record(item, self._truncated) for item in self._waiting]
        if self._whole and self.rows:
            write_samples(Path(self._whole), self._step, self.rows)
