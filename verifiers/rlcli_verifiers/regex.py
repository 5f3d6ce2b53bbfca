"""A pattern that the response must match."""

from __future__ import annotations

import re
from typing import Literal

from rlcli.types import Verdict, VerifyRequest
from rlcli_verifiers.answers import OPEN_THINK, judged, no_answer

ROW_OPTIONS = ("pattern", "match")

MAX_CHARS = 100_000
"""The pattern is matched against this many characters at the end of a response."""


def verify(request: VerifyRequest, *, pattern: str = "", match: Literal["full", "search"] = "full") -> Verdict | None:
    """The text after </think>, without white space around it, matches the pattern: the option's, else the ground truth.

    match: "full" (from the first character to the last) or "search" (anywhere). `.` matches line ends too. The answer
    is the group `answer`, if the pattern has one, else the whole match. A match that takes too long is killed by the
    pool (WRONG, if that happens twice). None if neither option nor row gives a pattern; `ValueError` for one that
    does not compile.
    """
    wanted = pattern or request.ground_truth
    if not wanted:
        return None
    if match not in ("full", "search"):
        raise ValueError(f"match={match!r} is neither full nor search")
    try:
        compiled = re.compile(wanted, re.DOTALL)
    except re.error as error:
        raise ValueError(f"the pattern {wanted!r} does not compile: {error}") from error
    answer = request.answer_text()
    if answer is None:
        return no_answer(OPEN_THINK)
    text = answer[-MAX_CHARS:].strip()
    matched = compiled.fullmatch(text) if match == "full" else compiled.search(text)
    if matched is None:
        return judged(False, text[-200:], "the pattern does not match")
    return judged(True, matched.groupdict().get("answer") or matched[0])
