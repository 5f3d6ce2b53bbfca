"""A verifier package as a stranger would publish it, found through entry points on PYTHONPATH."""

from __future__ import annotations

import time

from rlcli.rewards.gold_verifiers import WITHOUT_ANSWER
from rlcli.types import Outcome, Verdict, VerifyRequest


def even(request: VerifyRequest) -> Verdict:
    """Rewards what random text can earn: an even number of digits. So that a random model has something to learn."""
    right = sum(character.isdigit() for character in request.completion) % 2 == 0
    return Verdict(score=float(right), outcome=Outcome.OK if right else Outcome.WRONG, answer=request.completion[-8:])


def crash(request: VerifyRequest) -> Verdict:
    """Fails on every response."""
    raise ValueError(f"cannot read {len(request.completion)} characters")


def crash_on_the_model(request: VerifyRequest) -> Verdict:
    """Fails on every response that a random model writes, but not on those that are tried before a run."""
    if request.completion in (request.ground_truth, WITHOUT_ANSWER):
        return Verdict(0.0, Outcome.WRONG)
    raise ValueError(f"cannot read {len(request.completion)} characters")


def hang(request: VerifyRequest) -> Verdict:
    """Never answers, but on what is tried before a run."""
    if request.completion in (request.ground_truth, WITHOUT_ANSWER):
        return Verdict(0.0, Outcome.WRONG)
    while True:
        time.sleep(1)
