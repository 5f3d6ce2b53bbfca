"""The shape of a response, whatever it says."""

from __future__ import annotations

import re

from rlcli.types import Outcome, Verdict, VerifyRequest
from rlcli_verifiers.answers import is_blank, judged, no_answer

ANSWER_KIND = "shape"

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_THINK_THEN_ANSWER = re.compile(r"\s*<think>.*?</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)


def verify(request: VerifyRequest, *, pattern: str = "") -> Verdict:
    """The response is <think>…</think><answer>…</answer>, or as a whole matches the row's or the option's regex.

    Each tag exactly once, nothing but white space around and between the two blocks, and an answer that can be seen.
    pattern: a regex in place of that; the row's own, extra_info["format"], goes first. It is matched with DOTALL from
    the first character to the last; its group `answer`, if it has one, must not be empty. A <think> that the prompt
    opened counts as the response's own. OK: the shape is right. NO_ANSWER: it is not, score 0. Raises `ValueError` for
    a regex that does not compile.
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
        return no_answer("the response has another shape")
    answer = match.groupdict().get("answer")
    if answer is None:
        return Verdict(1.0, Outcome.OK)
    return judged(True, answer.strip()) if not is_blank(answer) else no_answer("the answer is empty")


def gold(request: VerifyRequest) -> str:
    """The ground truth in the usual shape; a regex of the row's own has to be met by a response of the row's own."""
    return f"<think>\nas it is known\n</think>\n<answer>{request.ground_truth or 'yes'}</answer>"


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} does not compile: {error}") from error
