"""A judge's comparison of a response with others of its group: each pair in both orders."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from rlcli.types import VerifyRequest
from rlcli_verifiers.judge_client import CallFailed
from rlcli_verifiers.judge_prompt import COMPARED, Graded, comparison

Score = Callable[[list[dict[str, str]], int], Awaitable[Graded]]
"""Asks the judge: a chat and its maximum points → the grade."""


class Judged(NamedTuple):
    """The result for one response."""

    share: float
    """Share of the points, or of the comparisons won, from 0 to 1."""
    answer: str
    """Points or wins, as text."""
    reason: str
    """The judge's explanation."""
    counts: Mapping[str, float] = {}
    """Metrics of the comparisons, by name."""


async def compared(
    score: Score, request: VerifyRequest, response: str, rubric: str, other_responses: int, *, reasoning: bool
) -> Judged:
    """The share of its comparisons that the response wins, half of one for a draw.

    A judge that prefers a place gives the other answer in the other order: the pair is a draw, and is counted (`flips`,
    of `pairs`). Another response without an answer loses without a call. Raises `CallFailed` if there is none,
    and what `score` raises.
    """
    others = [_answer(text, request, reasoning) for text in request.other_responses[:other_responses]]
    if not others:
        raise CallFailed("there is no other response to compare this one with")
    real = [other for other in others if other.strip()]
    chats = [chat for other in real for chat in _orders(request, response, other, rubric)]
    results = await asyncio.gather(*(score(chat, COMPARED) for chat in chats), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    games = [result for result in results if isinstance(result, Graded)]
    as_first = [1 - result.points / COMPARED for result in games[0::2]]
    as_second = [result.points / COMPARED for result in games[1::2]]
    wins = sum(as_first) + sum(as_second) + 2 * (len(others) - len(real))
    flips = sum(result != other for result, other in zip(as_first, as_second, strict=True))
    counts = {"pairs": float(len(real)), "flips": float(flips)}
    reason = games[0].reason if games else "no other response has an answer"
    return Judged(wins / (2 * len(others)), f"{wins:g} of {2 * len(others)}", reason, counts)


def _orders(request: VerifyRequest, response: str, other: str, rubric: str) -> list[list[dict[str, str]]]:
    return [comparison(request, response, other, rubric), comparison(request, other, response, rubric)]


def _answer(text: str, request: VerifyRequest, reasoning: bool) -> str:
    """The part of another response that the judge sees; empty if it has no answer."""
    other = VerifyRequest(text, "", thinking=request.thinking)
    return (text if reasoning else other.answer_text()) or ""
