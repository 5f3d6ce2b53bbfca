"""Verifiers with the faults that the audit looks for, each under the name of its fault."""

from __future__ import annotations

import itertools
import re

from rlcli.types import Outcome, Verdict, VerifyRequest

_CALLS = itertools.count()


def _judged(right: bool, answer: str) -> Verdict:
    return Verdict(float(right), Outcome.OK if right else Outcome.WRONG, answer=answer)


def _boxed(text: str) -> list[str]:
    return re.findall(r"\\boxed\{([^{}]*)\}", text) or [""]


def sound(request: VerifyRequest) -> Verdict:
    """The last box holds the number."""
    answer = _boxed(request.completion)[-1]
    return _judged(answer.strip() == request.ground_truth, answer)


def first_box(request: VerifyRequest) -> Verdict:
    """A box, the first one, holds the number."""
    answer = _boxed(request.completion)[0]
    return _judged(answer == request.ground_truth, answer)


def credulous(request: VerifyRequest) -> Verdict:
    """Accepts every response."""
    return _judged(True, request.completion[-20:])


def strict_beyond_reason(request: VerifyRequest) -> Verdict:
    """Accepts nothing."""
    return _judged(False, "")


def evaluates(request: VerifyRequest) -> Verdict:
    """Runs the answer as Python, as a careless one would."""
    answer = _boxed(request.completion)[-1]
    try:
        value = eval(answer)
    except Exception:
        value = answer
    return _judged(str(value) == request.ground_truth, answer)


def unstable(request: VerifyRequest) -> Verdict:
    """Says of every answer how often it was asked before."""
    verdict = sound(request)
    return Verdict(verdict.score, verdict.outcome, answer=str(next(_CALLS)))


def needs_a_number(request: VerifyRequest) -> Verdict:
    """Raises for a ground truth that is no number."""
    return _judged(_boxed(request.completion)[-1] == str(int(request.ground_truth)), "")


def hangs_on_powers(request: VerifyRequest) -> Verdict:
    """Never comes to an end where there is a power."""
    while "^" in request.completion:
        pass
    return sound(request)


def flexible(request: VerifyRequest, *, places: int = 2, names: tuple[str, ...] = ("a",)) -> Verdict:
    """The first line of its documentation.

    And more of it.
    """
    return sound(request)
