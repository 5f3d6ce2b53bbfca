"""A short answer, numbers with a tolerance: the relaxed accuracy of ChartQA (Masry et al., 2022, arXiv:2203.10244)."""

from __future__ import annotations

import re
from decimal import Decimal

from rlcli.types import Verdict, VerifyRequest
from rlcli_verifiers.answers import OPEN_THINK, judged, last_tag, no_answer

ROW_OPTIONS = ("tolerance",)

MAX_CHARS = 100
"""Maximum length of an answer that is read as a number."""
_NUMBER = re.compile(r"([-+]?)\$?(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)\s*%?", re.ASCII)


def verify(request: VerifyRequest, *, tolerance: float = 0.05) -> Verdict:
    """The last <answer>…</answer> is the ground truth: as a number within `tolerance` times its size, else as text in
    which case does not matter.

    `1,234`, `$1234` and `1234%` are the number 1234. Of a ground truth that is no number, or 0, nothing else is near.
    Raises `ValueError` for a tolerance outside of 0 to 1 and for an empty ground truth.
    """
    truth = request.ground_truth.strip()
    if not 0 <= tolerance < 1 or not truth:
        raise ValueError(
            f"tolerance={tolerance} and ground truth {truth!r}: give 0 or more and less than 1, and a text"
        )
    text = request.answer_text()
    if text is None:
        return no_answer(OPEN_THINK)
    answer = last_tag(text)
    if not answer:
        return no_answer("no <answer>…</answer>")
    target, value = _number(truth), _number(answer)
    if target is None or value is None:
        return judged(answer.casefold() == truth.casefold(), answer)
    return judged(abs(value - target) <= abs(target) * Decimal(str(tolerance)), answer)


def gold(request: VerifyRequest) -> str:
    """The ground truth in the tag."""
    return f"<answer>{request.ground_truth.strip()}</answer>"


def _number(text: str) -> Decimal | None:
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= MAX_CHARS else None
    return None if match is None else Decimal(match[1] + match[2].replace(",", ""))
