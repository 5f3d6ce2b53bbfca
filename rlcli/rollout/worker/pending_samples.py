"""Pending samples, which wait for their verdicts, and the files that samples are written to."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from rlcli.cluster.watchdog import progress
from rlcli.data.columns import TruncatedRule, exclusion_reason
from rlcli.data.messages import PromptTask
from rlcli.data.sample_files import LogProbSummary, PartWriter, SampleRow, sample_row, write_samples
from rlcli.data.signature import tokens_digest
from rlcli.data.step_images import MOST, images_path, write_images
from rlcli.data.trajectories import Trajectory
from rlcli.environments.environment import Message
from rlcli.environments.finished_conversation import FinishedConversation
from rlcli.rewards.service.scoring_client import Scored
from rlcli.support.files import filled_path
from rlcli.types import ENDED, Outcome, Prompt, Sample, Verdict

PLACEHOLDER_VERDICT = Verdict(score=math.nan, outcome=Outcome.CRASH, detail="not verified yet")
"""Placeholder for the verdict of a pending sample."""


@dataclass(frozen=True)
class PendingSample:
    """A sample that waits for its verdict."""

    prompt: Prompt
    """Its prompt."""
    sample: Sample
    """The sample with a placeholder as its verdict, and without its signature."""
    scored: Future[Scored]
    """Its text and its verdict."""
    log_probs: LogProbSummary | None
    """Summary of the log-probs of its response tokens; None if there are none."""
    digest: int
    """Digest of its trajectory (`rlcli.data.signature.tokens_digest`); 0 if the trajectory is not kept."""
    checksum: int
    """CRC-32 of the verified tokens, as in `Scored`."""
    messages: Sequence[Message] = ()
    """Messages of a conversation."""
    trajectory: Trajectory | None = None
    """Its trajectory; None in an evaluation, which does not keep it."""
    copies: Mapping[str, bytes] = field(default_factory=dict)
    """Digest → small copy, of the images that a conversation showed."""


def last_turn_bytes(trajectory: Trajectory) -> bytes:
    """The policy's last turn, as int32 bytes for the scoring service."""
    return trajectory.last_turn.astype("int32").tobytes()


def pending_sample(
    task: PromptTask,
    sample: int,
    trajectory: Trajectory,
    scored: Future[Scored],
    *,
    shard: int,
    seed: int,
    keep_tokens: bool = True,
    saved_group: int = 0,
    conversation: FinishedConversation | None = None,
    keep_copies: bool = False,
) -> PendingSample:
    """Build the pending sample of a finished trajectory.

    keep_tokens: false in an evaluation, whose tokens may not fit in a worker's memory. saved_group: as in `Sample`.
    conversation: of a sample with an environment. keep_copies: keep copies of the images that the environment showed.
    """
    assert trajectory.stop_reason is not None, "the response is not finished"
    versions = [version for version in trajectory.versions if version is not None]
    oldest, newest = min(versions), max(versions)
    unverified = Sample(
        prompt=task.group,
        sample=sample,
        shard=shard,
        row=0,
        prompt_tokens=trajectory.prompt_tokens,
        response_tokens=trajectory.response_tokens,
        stop_reason=trajectory.stop_reason,
        verdict=PLACEHOLDER_VERDICT,
        version=oldest,
        seed=seed,
        context_tokens=len(trajectory.tokens) - trajectory.prompt_tokens - trajectory.response_tokens,
        turns=trajectory.turns,
        newer_by=newest - oldest,
        version_tokens=tuple(map(trajectory.tokens_of_version, range(oldest, newest + 1))) if newest > oldest else (),
        ended=conversation.ended if conversation else 0,
        tool_calls=conversation.tool_calls if conversation else 0,
        failed_calls=conversation.failed_calls if conversation else 0,
        turn_rewards=conversation.turn_rewards if conversation else (),
        turn_states=conversation.turn_states if conversation else (),
        branches=len(trajectory.branch_starts),
        saved_group=saved_group,
    )
    digest = tokens_digest(trajectory) if keep_tokens else 0
    summary = LogProbSummary.of(trajectory.log_probs)
    messages = conversation.fields.get("conversation", ()) if conversation else ()
    return PendingSample(
        prompt=task.prompt,
        sample=unverified,
        scored=scored,
        log_probs=summary,
        digest=digest,
        checksum=zlib.crc32(last_turn_bytes(trajectory)),
        messages=messages,
        trajectory=trajectory if keep_tokens else None,
        copies=_copies(task.prompt, conversation) if conversation and keep_copies else {},
    )


def _copies(prompt: Prompt, conversation: FinishedConversation) -> Mapping[str, bytes]:
    """Copies of the images that the environment showed, without those of the row."""
    row_images = frozenset(prompt.image_digests()) if conversation.copies else frozenset()
    return {digest: copy for digest, copy in conversation.copies.items() if digest not in row_images}


def wait_for_verdict(scored: Future[Scored]) -> Scored:
    """Wait for a verdict. Each one is progress for the watchdog, however long the queue is."""
    result = scored.result()
    progress()
    return result


def _record(item: PendingSample, rule: TruncatedRule | Literal[""]) -> SampleRow:
    """The row of a response in the table of samples, once it has a verdict."""
    text, verdict, _ = wait_for_verdict(item.scored)
    sample = item.sample
    left_out = exclusion_reason(verdict.outcome, sample.stop_reason == "length", rule) if rule else ""
    return sample_row(
        item.prompt,
        sample.sample,
        text,
        verdict,
        prompt_tokens=sample.prompt_tokens,
        response_tokens=sample.response_tokens,
        finish_reason=sample.stop_reason,
        log_probs=item.log_probs,
        version=sample.version,
        newest_version=sample.version + sample.newer_by,
        turns=sample.turns,
        left_out=left_out,
        ended=ENDED[sample.ended],
        messages=item.messages,
        turn_rewards=sample.turn_rewards,
        group=sample.saved_group,
    )


class Saver:
    """Writes a rollout's samples: in parts as they finish, or all at the end. save_as, truncated: as in
    `RolloutArguments`."""

    def __init__(self, save_as: str, rank: int, step: int, truncated: TruncatedRule | Literal[""] = "") -> None:
        path = filled_path(save_as, "rank", rank)
        self.rows: list[SampleRow] = []
        """Rows of the samples, unless they are written in parts."""
        self._copies: dict[str, bytes] = {}
        self._step, self._truncated = step, truncated
        in_parts = "{part}" in Path(path).name
        self._path = "" if in_parts else path
        self._parts = PartWriter(path, step) if in_parts else None
        self._waiting: list[PendingSample] = []

    @property
    def keeps_copies(self) -> bool:
        """True if copies of images are written: not with parts."""
        return bool(self._path)

    def wait_for(self, item: PendingSample) -> None:
        """Queue a sample to be written once it has a verdict, if samples are written in parts."""
        if self._parts is not None:
            self._waiting.append(item)

    def add(self, items: Sequence[PendingSample]) -> None:
        """Queue samples that have verdicts, unless samples are written in parts."""
        if self._parts is None:
            self._waiting += items

    def save_finished(self) -> None:
        """Write the samples that have a verdict, if samples are written in parts."""
        if self._parts is None:
            return
        waiting = []
        for item in self._waiting:
            if item.scored.done():
                self._parts.add(_record(item, self._truncated))
            else:
                waiting.append(item)
        self._waiting = waiting

    def save_rest(self) -> None:
        """Wait for the missing verdicts, and write all samples."""
        items, self._waiting = self._waiting, []
        new = [_record(item, self._truncated) for item in items]
        if self._parts is not None:
            for row in new:
                self._parts.add(row)
            self._parts.flush()
            return
        self.rows += new
        if self._path and new:
            write_samples(Path(self._path), self._step, self.rows)
        copies = {digest: copy for item in items for digest, copy in item.copies.items() if digest not in self._copies}
        if copies and len(self._copies) < MOST:
            self._copies |= islice(copies.items(), MOST - len(self._copies))
            write_images(images_path(Path(self._path)), self._copies)
