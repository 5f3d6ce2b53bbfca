"""The format of a response, whatever its content."""

from __future__ import annotations

import re

from rlcli.types import Outcome, Verdict, VerifyRequest
from rlcli_verifiers.answers import is_blank, judged, no_answer

ANSWER_KIND = "shape"
ROW_OPTIONS = ("pattern",)

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_THINK_THEN_ANSWER = re.compile(r"\s*<think>.*?</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)


def verify(request: VerifyRequest, *, pattern: str = "") -> Verdict:
    """The response is <think>…</think><answer>…</answer>, or as a whole matches the row's or the option's regex.

    Each tag exactly once, only white space around and between the two blocks, and a visible answer.
    pattern: a regex to use instead; the row's own, extra_info["format"], takes precedence. It is matched with DOTALL
    from the first character to the last; its group `answer`, if it has one, must not be empty. A <think> that the
    prompt opened counts as the response's own. OK: the format is right. NO_ANSWER: it is not, score 0. Raises
    `ValueError` for a regex that does not compile.
    """
    wanted = str(request.extra_info.get("format") or pattern)
    text = request.completion
    opened = request.thinking and not text.lstrip().startswith("<think>")
    if wanted:
        forms = (text, f"<think>{text}", f"<think>\n{text}") if opened else (text,)
        match = next(filter(None, map(_compiled(wanted).fullmatch, forms)), None)
    else:
        text = f"<think>{text}" if opened else text
        match = _THINK_THEN_ANSWER.fullmatch(text) if all(text.count(tag) == 1 for tag in _TAGS) else None
    if match is None:
        return no_answer("the response does not have the format")
    answer = match.groupdict().get("answer")
    if answer is None:
        return Verdict(1.0, Outcome.OK)
    return judged(True, answer.strip()) if not is_blank(answer) else no_answer("the answer is empty")


def gold(request: VerifyRequest, *, pattern: str = "") -> str:
    """The ground truth in the usual format. pattern: the first that matches of it, the bare ground truth and the row's
    own response; matched only in a scoring process, which has a deadline. A row with its own regex has a response
    that must match it."""
    usual = f"<think>\nas it is known\n</think>\n<answer>{request.ground_truth or 'yes'}</answer>"
    if not pattern:
        return usual
    wanted = str(request.extra_info.get("format") or pattern)
    forms = (usual, request.ground_truth, str(request.extra_info.get("response") or ""))
    return next(filter(_compiled(wanted).fullmatch, forms), usual)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} does not compile: {error}") from error
