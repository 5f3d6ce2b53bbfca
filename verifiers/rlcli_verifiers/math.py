"""Mathematics: the final answer, a number or a formula, compared by value."""

from __future__ import annotations

from rlcli.types import Verdict, VerifyRequest
from rlcli_verifiers import symbolic
from rlcli_verifiers.alternatives import corrected, last_boxes
from rlcli_verifiers.answers import OPEN_THINK, boxes, judged, last_tag, no_answer
from rlcli_verifiers.latex import equal
from rlcli_verifiers.sentences import of_last_line, of_sentence, statement

ANSWER_KIND = "latex"
ROW_OPTIONS = ()

TAIL_CHARS = 8000
"""The answer is searched in this many characters at the end of a response."""


def verify(request: VerifyRequest) -> Verdict:
    """The last \\boxed{} (else what follows "the answer is", else a last line of mathematics) equals the ground truth.

    It is searched after the last </think>, and in the last <answer> tag if there is one.
    Equal means: the same text, the same number, the same elements of a list, point or interval, or the same value by
    math-verify. Units may be left out; decimals are exact, unless the ground truth itself is rounded. A retracted
    answer does not count; several boxes joined by "or" are one list, so hedging is WRONG. The ground truth is the
    bare answer or a solution with a \\boxed{}. Raises `ValueError` if it is empty.
    """
    truth = ", ".join(_truth(request))
    text = request.answer_text()
    if text is None:
        return no_answer(OPEN_THINK)
    stated = extract(text[-TAIL_CHARS:])
    if not stated:
        return no_answer('no \\boxed{}, no "answer is", and a last line that is not mathematics')
    answer = ", ".join(stated)
    right = equal(truth, answer) or (len(stated) > 1 and all(equal(truth, one) for one in stated))
    return judged(right, answer)


def gold(request: VerifyRequest) -> str:
    """A response that gives the ground truth, an answer or a solution, in a box."""
    return f"Therefore the answer is $\\boxed{{{', '.join(_truth(request))}}}$."


def preload() -> None:
    """Import math-verify and build its parser, once, before scoring processes are forked."""
    symbolic.same(r"\frac{1}{2}x^{2}", "x^{2}+0.5")
    symbolic.same("y=3x+1", "y-3x=1")  # the solvers of sympy load on first use


def _truth(request: VerifyRequest) -> list[str]:
    truth = request.ground_truth
    stated = extract(truth) if boxes(truth) else [truth.strip()]
    if not any(stated):
        raise ValueError("the ground truth is empty")
    return stated


def extract(text: str) -> list[str]:
    """The final answer that a text states; several if it offers alternatives; none if it states nothing.

    The last one counts: a text may correct itself. If an `<answer>` is closed and no box follows, only the content of
    the last one counts.
    """
    tagged = last_tag(text)
    if boxes(text.rpartition("</answer>")[2]):
        tagged = None  # a box after it is later
    if tagged is not None:
        text = tagged
    found = boxes(text)
    if found:
        correction = corrected(text[found[-1][1] :])
        return [correction] if correction is not None else last_boxes(text, found)
    after = statement(text)
    if after is not None:
        correction = corrected(after)
        return [correction] if correction is not None else of_sentence(after)
    if tagged is not None:  # the whole content is the answer
        return of_last_line(tagged, alone=True) or ([tagged] if tagged else [])
    return of_last_line(text)
