"""Scores the saved samples of a run again, with another verifier, and compares the new scores with the old ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcli.data.sample_files import sample_files
from rlcli.evaluation.evaluation_folder import read_samples
from rlcli.rewards.processes.scoring_pool import ScoringPool, in_order
from rlcli.rewards.trial import check_responses
from rlcli.types import UNVERIFIED, USAGE, Outcome, Prompt, Verdict, VerifyRequest

COLUMNS = (
    "prompt_id", "sample", "prompt", "response", "ground_truth", "score", "outcome", "finish_reason", "response_tokens",
    "turns", "group",
)  # fmt: skip
RESCORED = "rescored"
"""Folder of a run with the output of `rlcli rescore --keep`."""
_STEP = re.compile(r"step-(\d+)")

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Stored:
    """One saved sample: its step and the columns of its row."""

    step: int
    fields: Mapping[str, Any]


@dataclass
class Agreement:
    """Old and new scores of some samples."""

    old: list[float] = field(default_factory=list)
    """Scores of the samples with both verdicts."""
    new: list[float] = field(default_factory=list)
    """Scores of the same samples by the other verifier."""
    agree: int = 0
    """Samples whose outcomes are both ok, or both not."""
    unverified: int = 0
    """Samples without a verdict, old or new; they count here alone."""

    def add(self, stored: Stored, verdict: Verdict) -> None:
        old_outcome = stored.fields["outcome"]
        if old_outcome in UNVERIFIED or verdict.outcome in UNVERIFIED:
            self.unverified += 1
            return
        self.old.append(stored.fields["score"])
        self.new.append(verdict.score)
        self.agree += (old_outcome == Outcome.OK) == (verdict.outcome is Outcome.OK)

    def as_dict(self) -> dict[str, Any]:
        count = len(self.old)
        return {
            "samples": count,
            "unverified": self.unverified,
            "old": math.fsum(self.old) / count if count else None,
            "new": math.fsum(self.new) / count if count else None,
            "agreement": self.agree / count if count else None,
            "correlation": _correlation(self.old, self.new),
        }


@dataclass
class Rescored:
    """The result of scoring samples again."""

    steps: dict[int, Agreement] = field(default_factory=dict)
    """Step → its samples."""
    overall: Agreement = field(default_factory=Agreement)
    """The samples of all steps."""
    usage: dict[str, float] = field(default_factory=dict)
    """Usage that the verifier reports, summed."""
    outcomes: dict[str, int] = field(default_factory=dict)
    """New outcome → number of samples."""
    several_turns: int = 0
    """Samples of conversations, which are not scored again."""
    unknown: int = 0
    """Samples of prompts that the data does not have; they are scored by their saved columns."""
    examples: list[str] = field(default_factory=list)
    """Details of the first samples without a new verdict."""

    def add(self, stored: Stored, verdict: Verdict) -> None:
        for agreement in (self.overall, self.steps.setdefault(stored.step, Agreement())):
            agreement.add(stored, verdict)
        self.outcomes[verdict.outcome] = self.outcomes.get(verdict.outcome, 0) + 1
        for name, value in verdict.parts.items():
            if name.startswith(USAGE):
                self.usage[name] = self.usage.get(name, 0.0) + value
        if verdict.outcome in UNVERIFIED and len(self.examples) < 3:
            self.examples.append(verdict.detail)


def steps_of(folder: Path) -> list[int]:
    """The steps with saved samples, ascending. folder: the run's `samples` or `evaluations`."""
    steps = set()
    for path in folder.glob("step-*"):
        name = _STEP.match(path.name)
        if name and (path.match("*.rank-*.parquet") or any(path.glob("rank-*.parquet"))):
            steps.add(int(name[1]))
    return sorted(steps)


def stored_samples(folder: Path, steps: Sequence[int]) -> list[Stored]:
    """The samples of these steps. Raises `DataError` for a file that cannot be read."""
    return [
        Stored(step, row)
        for step in steps
        for file in sample_files(folder, step)
        for row in read_samples(file, COLUMNS).to_pylist()
    ]


def rescore(
    samples: Sequence[Stored],
    prompts: Mapping[str, Prompt],
    verifier: str,
    pool: ScoringPool,
    *,
    thinking: bool = False,
    on_verdict: Callable[[Stored, Verdict], None] = lambda stored, verdict: None,
    on_progress: OnProgress = lambda phase, done, total: None,
) -> Rescored:
    """Score the samples with `verifier`, or with that of their row in `prompts`, by id.

    thinking: the run's prompts ended within an open <think>. The tokens are not saved: a verifier that counts them gets
    the right number, but not their ids.
    """
    result = Rescored()
    single = _of_one_turn(samples)
    result.several_turns = len(samples) - len(single)
    result.unknown = sum(sample.fields["prompt_id"] not in prompts for sample in single)

    def submit(numbered: tuple[int, Stored]) -> Future[Verdict]:
        done, stored = numbered
        on_progress("rescore", done, len(single))
        return _submitted(stored, prompts, verifier, pool, thinking)[1]

    verdicts: Iterator[tuple[tuple[int, Stored], Verdict]] = in_order(enumerate(single), submit)
    for (_, stored), verdict in verdicts:
        result.add(stored, verdict)
        on_verdict(stored, verdict)
    return result


def try_verifier(
    samples: Sequence[Stored],
    prompts: Mapping[str, Prompt],
    verifier: str,
    pool: ScoringPool,
    *,
    thinking: bool = False,
) -> None:
    """Raise `VerifierError` if the verifier crashes on all samples that are tried, before anything is written. Its
    arguments are those of `rescore`."""
    check_responses(
        _of_one_turn(samples),
        lambda stored: f"that of step {stored.step} to {stored.fields['prompt_id']}",
        lambda stored: _submitted(stored, prompts, verifier, pool, thinking),
    )


def _of_one_turn(samples: Sequence[Stored]) -> list[Stored]:
    return [stored for stored in samples if (stored.fields["turns"] or 1) == 1]


def _submitted(
    stored: Stored, prompts: Mapping[str, Prompt], verifier: str, pool: ScoringPool, thinking: bool
) -> tuple[str, Future[Verdict]]:
    """The expression that scores a sample, and its verdict."""
    prompt = prompts.get(stored.fields["prompt_id"])
    expression = prompt.verifier if prompt else verifier
    return expression, pool.submit(expression, _request(stored, prompt, thinking))


def _request(stored: Stored, prompt: Prompt | None, thinking: bool) -> VerifyRequest:
    row = stored.fields
    messages = ({"role": "user", "content": row["prompt"] or ""},)
    return VerifyRequest(
        row["response"],
        prompt.ground_truth if prompt else row["ground_truth"] or "",
        prompt.messages if prompt else messages,
        prompt.data_source if prompt else "",
        prompt.extra_info if prompt else {},
        completion_ids=range(row["response_tokens"] or 0),
        finish_reason="length" if row["finish_reason"] == "length" else "stop",
        thinking=thinking,
    )


def _correlation(old: Sequence[float], new: Sequence[float]) -> float | None:
    import numpy as np

    if len(old) < 2 or min(old) == max(old) or min(new) == max(new):
        return None
    return float(np.corrcoef(old, new)[0, 1])
