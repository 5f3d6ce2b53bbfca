"""Soft overlong punishment (DAPO; Yu et al., 2025, arXiv:2503.14476, equation 13)."""

from __future__ import annotations

from typing import Literal

from rlcli.types import Outcome, Verdict, VerifyRequest
from rlcli_verifiers.length import length

ANSWER_KIND = "length"
ROW_OPTIONS = ("max_tokens", "buffer", "unit")


def verify(
    request: VerifyRequest,
    *,
    max_tokens: int = 20480,
    buffer: int = 4096,
    unit: Literal["tokens", "words"] = "tokens",
) -> Verdict:
    """0 up to `max_tokens - buffer` tokens, then falling linearly to -1 at `max_tokens`, and -1 beyond.

        score = 0                                          n ≤ max_tokens - buffer
                (max_tokens - buffer - n) / buffer         in between
                -1                                         n ≥ max_tokens

    A penalty to add to a reward: `math + overlong(max_tokens=4096, buffer=512)`. unit: "words" if token ids are
    unknown. Raises `ValueError` if tokens are requested but unknown, and unless 0 < buffer <= max_tokens.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"buffer={buffer} must be above 0 and at most max_tokens={max_tokens}")
    count = length(request, unit)
    score = min(0.0, max(-1.0, (max_tokens - buffer - count) / buffer))
    return Verdict(score, Outcome.OK, detail=f"{count} {unit}, at most {max_tokens - buffer} go free")


def gold(request: VerifyRequest) -> str:
    """A response of one word, which no limit punishes."""
    return request.ground_truth.split()[0] if request.ground_truth.split() else "short"
