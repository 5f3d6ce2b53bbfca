"""Forms of stating a right answer that the verifier reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlcli.types import Outcome, Verdict, VerifyRequest
from rlcli_audit.audit_subject import Gold, Subject

GOLD_FORM = "the verifier's own gold"

_SLOT = "⟨answer⟩"
_TEMPLATES = {
    "\\boxed{X}": f"Step by step, then.\n\n\\boxed{{{_SLOT}}}",
    "The answer is X": f"Step by step, then.\n\nThe answer is {_SLOT}",
    "#### X": f"Step by step, then.\n#### {_SLOT}",
    "<answer>X</answer>": f"<think>\nStep by step, then.\n</think>\n<answer>{_SLOT}</answer>",
    "<answer>\\boxed{X}</answer>": f"<think>\nStep by step, then.\n</think>\n<answer>\\boxed{{{_SLOT}}}</answer>",
    "X": _SLOT,
}
_BOX = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")

Verify = Callable[[Sequence[tuple[str, VerifyRequest]]], list[Verdict]]
"""The verdicts on (expression, request) pairs, in order."""


@dataclass(frozen=True)
class Form:
    """One way to write a response that gives an answer."""

    name: str
    """Name in the report."""
    right: Callable[[VerifyRequest], str | None]
    """Row → response with its right answer; None if it cannot be written."""
    other: Callable[[VerifyRequest, str], str | None]
    """Row and another answer → response with that answer; None if it cannot be written."""


def choose_form(subject: Subject, rows: Sequence[VerifyRequest], verify: Verify) -> Form | None:
    """The form that the verifier accepts in most of `rows`; for a sum, the one with the highest score; None if there is
    none.

    The gold of a verifier without options is not tested here: if it is rejected, the audit must report that.
    """
    forms = [_of_gold(subject.gold)] if subject.gold else []
    forms += [_of_template(name, text) for name, text in _TEMPLATES.items()]
    if subject.gold and not subject.has_options and not subject.composed:
        return forms[0]
    best, best_rank = None, (0, 0.0)
    for form in forms:
        requests = [replace(row, completion=text) for row in rows if (text := _tried(form, row)) is not None]
        verdicts = verify([(subject.expression, request) for request in requests])
        scores = [verdict.score for verdict in verdicts if accepted(verdict, subject)]
        # For a sum the score decides, if the answer is read; a form accepted in few rows does not count.
        rank = (len(scores), round(sum(scores), 6))
        if rank > best_rank and 2 * len(scores) >= len(rows):
            best, best_rank = form, rank
    return best


def accepted(verdict: Verdict, subject: Subject) -> bool:
    """True if a verdict means that the answer is right: OK, and with a score of 1 if 1 is the full score."""
    return verdict.outcome is Outcome.OK and (verdict.score >= 1.0 or not subject.full_score)


def bare(ground_truth: str) -> str:
    r"""The answer in a ground truth that may be a whole solution.

    >>> bare("6 × 7 = 42\n#### 42"), bare(r"So it is $\boxed{\frac{1}{2}}$."), bare(" 17 ")
    ('42', '\\frac{1}{2}', '17')
    """
    if "####" in ground_truth:
        return ground_truth.rpartition("####")[2].strip()
    boxes = _BOX.findall(ground_truth)
    return str(boxes[-1] if boxes else ground_truth).strip()


def stater(form: Form | None, request: VerifyRequest, answer: str) -> Callable[[str], str | None]:
    """A function from another answer to a response that states it as `request.completion` states the right one."""
    right = request.completion

    def state(other: str) -> str | None:
        head, separator, tail = right.rpartition(answer) if answer else (right, "", "")
        if form is None:
            return head + other + tail if separator else None
        # A gold may normalize the answer that it writes, so that the change would be lost: insert it as text if that
        # is unambiguous.
        return head + other + tail if separator and right.count(answer) == 1 else form.other(request, other)

    return state


def _tried(form: Form, row: VerifyRequest) -> str | None:
    """The row's right answer in a form that may not fit it: a gold does not receive the verifier's options."""
    try:
        return form.right(row)
    except Exception:
        return None


def _of_template(name: str, text: str) -> Form:
    def other(request: VerifyRequest, answer: str) -> str:
        return text.replace(_SLOT, answer)

    return Form(name, lambda request: other(request, bare(request.ground_truth)), other)


def _of_gold(gold: Gold) -> Form:
    def right(request: VerifyRequest) -> str | None:
        return gold(request) or None

    def other(request: VerifyRequest, answer: str) -> str | None:
        try:
            return gold(replace(request, ground_truth=answer)) or None
        except Exception:  # it cannot write such an answer
            return None

    return Form(GOLD_FORM, right, other)
