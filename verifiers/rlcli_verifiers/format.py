"""The shape of a response, whatever it says."""

from __future__ import annotations

import re

from rlcli.types import Outcome, Verdict, VerifyRequest

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_THINK_THEN_ANSWER = re.compile(r"\s*<think>.*?</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)


def verify(request: VerifyRequest) -> Verdict:
    """The response is <think>…</think><answer>…</answer>, or matches the regex in extra_info["format"] as a whole.

    Each tag exactly once, nothing but white space around and between the two blocks, and an answer that is not empty.
    A regex is matched with DOTALL from the first character to the last; its group `answer`, if it has one, must not be
    empty. OK: the shape is right. NO_ANSWER: it is not, score 0. Raises `re.error` for a regex that does not compile.
    """
    pattern = request.extra_info.get("format")
    text = request.completion
    if pattern:
        match = re.compile(pattern, re.DOTALL).fullmatch(text)
    else:
        match = _THINK_THEN_ANSWER.fullmatch(text) if all(text.count(tag) == 1 for tag in _TAGS) else None
    if match is None:
        return Verdict(score=0.0, outcome=Outcome.NO_ANSWER)
    answer = match.groupdict().get("answer")
    if answer is not None and not answer.strip():
        return Verdict(score=0.0, outcome=Outcome.NO_ANSWER, detail="the answer is empty")
    return Verdict(score=1.0, outcome=Outcome.OK, answer=answer and answer.strip())
