"""An exact match with the text of the ground truth."""

from __future__ import annotations

from collections.abc import Callable

from rlcli.types import Verdict, VerifyRequest
from rlcli_verifiers.answers import OPEN_THINK, judged, last_box, last_line, last_tag, no_answer

ANSWER_KIND = "text"
ROW_OPTIONS = ("extract", "strip", "ignore_case")

_EXTRACTORS: dict[str, Callable[[str], str | None]] = {"all": str, "tag": last_tag, "line": last_line, "box": last_box}


def verify(request: VerifyRequest, *, extract: str = "", strip: bool = True, ignore_case: bool = False) -> Verdict:
    """The text after </think>, or the part of it that `extract` names, is the ground truth, character by character.

    extract: "all", "tag" (the last <answer>…</answer>), "line" (the last line), "box" (the last \\boxed{}); by default
    the row's extra_info answer_format, else "all". strip: ignore the white space around both. ignore_case: Straße
    equals STRASSE. Raises `ValueError` for an unknown `extract` and for an empty ground truth.
    """
    source = extract or str(request.extra_info.get("answer_format") or "all")
    if source not in _EXTRACTORS:
        raise ValueError(f"extract={source!r} is none of {', '.join(_EXTRACTORS)}")
    text = request.answer_text()
    truth, answer = request.ground_truth, None if text is None else _EXTRACTORS[source](text)
    if strip:
        truth, answer = truth.strip(), answer and answer.strip()
    if not truth:
        raise ValueError("the ground truth is empty")
    if text is None:
        return no_answer(OPEN_THINK)
    if not answer:
        return no_answer(f"the place that is read is empty ({source})")
    if ignore_case:
        return judged(answer.casefold() == truth.casefold(), answer)
    return judged(answer == truth, answer)


def gold(request: VerifyRequest, *, extract: str = "") -> str:
    """A response in which `extract`, else the row's answer_format, finds the ground truth."""
    source = extract or request.extra_info.get("answer_format")
    truth = request.ground_truth
    return {"tag": f"<answer>{truth}</answer>", "box": f"\\boxed{{{truth}}}"}.get(str(source), truth)
