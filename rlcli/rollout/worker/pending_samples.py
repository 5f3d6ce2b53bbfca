"""Generated responses that wait for their verdicts, and the files that they are written to."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rlcli.cluster.watchdog import progress
from rlcli.data.columns import TruncatedRule, exclusion
from rlcli.data.messages import PromptTask
from rlcli.data.sample_files import LogProbSummary, PartWriter, sample_row, write_samples
from rlcli.data.signature import tokens_digest
from rlcli.data.step_images import MOST, beside, write_pictures
from rlcli.data.trajectories import Trajectory
from rlcli.environments.finished_conversation import FinishedConversation
from rlcli.rewards.service.scoring_client import Scored
from rlcli.support.files import filled_path
from rlcli.types import ENDED, Outcome, Prompt, Sample, Verdict

UNVERIFIED = Verdict(score=math.nan, outcome=Outcome.CRASH, detail="not verified yet")
"""In place of the verdict of a sample that waits for it."""


@dataclass(frozen=True)
class PendingSample:
    """A sample that waits for its verdict."""

    source: Prompt
    """Its prompt."""
    sample: Sample
    """The sample with a placeholder as its verdict, and without its signature."""
    scored: Future[Scored]
    """Its text and its verdict."""
    log_probs: LogProbSummary | None
    """Summary of the log-probs of its response tokens; None if there are none."""
    digest: int
    """Digest of its trajectory (`rlcli.data.signature.tokens_digest`); 0 if that is not kept."""
    checksum: int
    """CRC-32 of what is verified, as in `Scored`."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Messages of a conversation."""
    whole: Trajectory | None = None
    """Its trajectory, if that is kept."""
    copies: Mapping[str, bytes] = field(default_factory=dict)
    """Digest → a small copy, of the pictures that a conversation showed."""


def sent(trajectory: Trajectory) -> bytes:
    """The policy's last turn in the form that the scoring service takes."""
    return trajectory.last_turn.astype("int32").tobytes()


def pending(
    task: PromptTask,
    sample: int,
    whole: Trajectory,
    scored: Future[Scored],
    *,
    shard: int,
    seed: int,
    keep_tokens: bool = True,
    saved_group: int = 0,
    held: FinishedConversation | None = None,
    keep_copies: bool = False,
) -> PendingSample:
    """keep_tokens: false in an evaluation, which generates more of them than fit in a worker's memory. saved_group: as
    in `Sample`. held: of a conversation. keep_copies: of the pictures that its environment showed."""
    assert whole.stop_reason is not None, "the response is not finished"
    versions = [version for version in whole.versions if version is not None]
    oldest, newest = min(versions), max(versions)
    unverified = Sample(
        prompt=task.prompt,
        sample=sample,
        shard=shard,
        row=0,
        prompt_tokens=whole.prompt_tokens,
        drawn_tokens=whole.drawn_tokens,
        stop_reason=whole.stop_reason,
        verdict=UNVERIFIED,
        version=oldest,
        seed=seed,
        context_tokens=len(whole.tokens) - whole.prompt_tokens - whole.drawn_tokens,
        turns=whole.turns,
        newer_by=newest - oldest,
        version_tokens=tuple(map(whole.drawn_by, range(oldest, newest + 1))) if newest > oldest else (),
        ended=held.ended if held else 0,
        tool_calls=held.tool_calls if held else 0,
        failed_calls=held.failed_calls if held else 0,
        turn_rewards=held.turn_rewards if held else (),
        turn_states=held.turn_states if held else (),
        branches=len(whole.branch_starts),
        saved_group=saved_group,
    )
    digest = tokens_digest(whole) if keep_tokens else 0
    summary = LogProbSummary.of(whole.log_probs)
    messages = held.fields.get("conversation", ()) if held else ()
    checksum, kept = zlib.crc32(sent(whole)), whole if keep_tokens else None
    copies = _copies(task.source, held) if held and keep_copies else {}
    return PendingSample(task.source, unverified, scored, summary, digest, checksum, messages, kept, copies)


def _copies(source: Prompt, held: FinishedConversation) -> Mapping[str, bytes]:
    """Of what its environment showed beside the row's own pictures."""
    own = frozenset(source.image_digests()) if held.copies else frozenset()
    return {digest: copy for digest, copy in held.copies.items() if digest not in own}


def awaited(scored: Future[Scored]) -> Scored:
    """Wait for a verdict: each one is progress for the watchdog, however long the queue."""
    there = scored.result()
    progress()
    return there


def _record(item: PendingSample, rule: TruncatedRule | Literal[""]) -> dict[str, Any]:
    """The row of a response, once it has a verdict."""
    text, verdict, _ = awaited(item.scored)
    sample = item.sample
    left_out = exclusion(verdict.outcome, sample.stop_reason == "length", rule) if rule else ""
    return sample_row(
        item.source,
        sample.sample,
        text,
        verdict,
        prompt_tokens=sample.prompt_tokens,
        response_tokens=sample.drawn_tokens,
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
    """Writes a rollout's samples: in parts as they finish, or all at the end. rows: those not written in parts.
    save_as, truncated: as in `RolloutCall`."""

    def __init__(self, save_as: str, rank: int, step: int, truncated: TruncatedRule | Literal[""] = "") -> None:
        path = filled_path(save_as, "rank", rank)
        self.rows: list[dict[str, Any]] = []
        self._copies: dict[str, bytes] = {}
        self._step, self._truncated = step, truncated
        in_parts = "{part}" in Path(path).name
        self._whole = "" if in_parts else path
        self._parts = PartWriter(path, step) if in_parts else None
        self._waiting: list[PendingSample] = []

    @property
    def keeps_copies(self) -> bool:
        """Whether it writes copies of pictures: not in parts."""
        return bool(self._whole)

    def wait_for(self, item: PendingSample) -> None:
        """Write it once it has a verdict, if samples are written in parts."""
        if self._parts is not None:
            self._waiting.append(item)

    def add(self, items: Sequence[PendingSample]) -> None:
        """Take samples that have verdicts. In parts they are written as they finish."""
        if self._parts is None:
            self._waiting += items

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
        items, self._waiting = self._waiting, []
        new = [_record(item, self._truncated) for item in items]
        if self._parts is not None:
            for row in new:
                self._parts.add(row)
            self._parts.flush()
            return
        self.rows += new
        if self._whole and new:
            write_samples(Path(self._whole), self._step, self.rows)
        copies = {digest: copy for item in items for digest, copy in item.copies.items() if digest not in self._copies}
        if copies and len(self._copies) < MOST:
            self._copies |= islice(copies.items(), MOST - len(self._copies))
            write_pictures(beside(Path(self._whole)), self._copies)
