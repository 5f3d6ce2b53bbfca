"""Repetition penalty by n-grams (Yeo et al., "Demystifying Long Chain-of-Thought", 2025, arXiv:2502.03373)."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.types import Outcome, Verdict, VerifyRequest

ANSWER_KIND = "length"
ROW_OPTIONS = ("n", "max_penalty")


def verify(request: VerifyRequest, *, n: int = 3, max_penalty: float = 1.0) -> Verdict:
    """Minus `max_penalty` times the share of repeated n-grams of words: 0 if none repeats.

        score = -max_penalty · (1 - distinct n-grams / n-grams)

    Words are separated by white space, in lower case; a text without any white space is read by its characters. A
    response of fewer than n words scores 0. Raises `ValueError` for n below 1 and a negative penalty.
    """
    if n < 1 or max_penalty < 0:
        raise ValueError(f"n={n} and max_penalty={max_penalty}: n is at least 1, the penalty is given as at least 0")
    words: Sequence[str] = request.completion.lower().split()
    if len(words) == 1:
        words = words[0]  # Chinese and Japanese, or one character over and over
    total = len(words) - n + 1
    if total < 1:
        return Verdict(0.0, Outcome.OK, detail="too short to repeat itself")
    distinct = len({tuple(words[start : start + n]) for start in range(total)})
    score = -max_penalty * (1.0 - distinct / total)
    return Verdict(min(score, 0.0) or 0.0, Outcome.OK, detail=f"{distinct} of {total} {n}-grams are distinct")


def gold(request: VerifyRequest) -> str:
    """A response that repeats nothing."""
    return request.ground_truth or "once"
