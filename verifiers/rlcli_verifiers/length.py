"""A reward for staying within a budget of tokens or words."""

from __future__ import annotations

import math
from typing import Literal

from rlcli.types import Outcome, Verdict, VerifyRequest

ANSWER_KIND = "length"
ROW_OPTIONS = ("target", "slack", "shape", "unit")


def verify(
    request: VerifyRequest,
    *,
    target: int = 1024,
    slack: int = 0,
    shape: Literal["linear", "cosine"] = "linear",
    unit: Literal["tokens", "words"] = "tokens",
) -> Verdict:
    """1 up to `target` tokens, then falling to 0 at `target + slack` (by default at twice the target).

    shape: "linear", or "cosine", which is flat at both ends. unit: "words" counts words if token ids are unknown.
    The row may give its own target in extra_info["target_length"]. It uses only this response: shaping against the
    shortest and longest of its group (Kimi k1.5) needs the whole group and belongs to the advantage. Raises
    `ValueError` if tokens are requested but unknown, and for a target below 1.
    """
    row_target = request.extra_info.get("target_length")  # None if rows of a file have it, but not this one
    target = target if row_target is None else int(row_target)
    if target < 1 or slack < 0:
        raise ValueError(f"target={target} and slack={slack}: the target is at least 1, the slack at least 0")
    if shape not in ("linear", "cosine"):
        raise ValueError(f"shape={shape!r} is neither linear nor cosine")
    count = length(request, unit)
    over = min(1.0, max(0.0, (count - target) / (slack or target)))
    score = 1.0 - over if shape == "linear" else (1.0 + math.cos(math.pi * over)) / 2
    return Verdict(score, Outcome.OK, detail=f"{count} {unit}, the target is {target}")


def length(request: VerifyRequest, unit: str) -> int:
    """Tokens or words of a response. Raises `ValueError` for another unit, and for unknown tokens."""
    if unit == "words":
        return len(request.completion.split())
    if unit != "tokens":
        raise ValueError(f"unit={unit!r} is neither tokens nor words")
    if request.completion and not request.completion_ids:
        raise ValueError("the response's token ids are not known here: give unit=words to count words")
    return len(request.completion_ids)


def gold(request: VerifyRequest) -> str:
    """A response of one word: within every budget. Scored by words if token ids are unknown."""
    return request.ground_truth.split()[0] if request.ground_truth.split() else "short"
