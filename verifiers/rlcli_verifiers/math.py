"""Mathematics: the final answer, a number or a formula, compared by value."""

from __future__ import annotations

import re

from rlcli.types import Verdict, VerifyRequest
from rlcli_verifiers import spoken, symbolic
from rlcli_verifiers.alternatives import corrected, joined_before, last_boxes, offered
from rlcli_verifiers.answer_words import foreign_statements
from rlcli_verifiers.answers import OPEN_THINK, boxes, judged, no_answer, tags
from rlcli_verifiers.latex import equal, is_choice
from rlcli_verifiers.notation import clean, words
from rlcli_verifiers.sentences import (
    by_cases,
    last_sentence,
    of_last_line,
    of_last_sentence,
    of_sentence,
    statement,
    tidy,
)

ANSWER_KIND = "latex"
ROW_OPTIONS = ()

_DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|rather\s+than|instead\s+of)|n[’']t(?:\s+be)?)[\s$\\(\[*]*$", re.IGNORECASE
)
"""Words before a box that is not the answer, "not $\\boxed{42}$"."""

_ASKED = re.compile(r"[\s$*:(]*[^\s?]{1,40}[\s$*)]{0,8}\?")
"""An answer that is doubted where it is stated, "So the answer is 60? No, 120."."""

_OPEN_ENDED = re.compile(r"[\s$\\)]*(?:or|and)\s+(?:more|less|fewer|greater|higher|lower|above|below)\b", re.IGNORECASE)
"""After a box, "or more"."""

_OPEN_BOX = re.compile(r"\\boxed\s*\{[^{}\n]*$")

_DECIMAL_COMMA = re.compile(r"\D{0,4}\d+,\d+\D{0,40}")

TAIL_CHARS = 8000
"""The answer is searched in this many characters at the end of a response."""


def verify(request: VerifyRequest) -> Verdict:
    """The last \\boxed{} (else what follows "the answer is", else the last line or sentence) equals the ground truth.

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
    tail = tidy(text[-TAIL_CHARS:])
    stated = extract(tail)
    said = _in_words(truth, tail, stated)
    if said:
        return judged(_is_said(truth, said), ", ".join(said))
    if not stated or said is not None:
        return no_answer('no \\boxed{}, no "answer is", and a last sentence without one value')
    answer = ", ".join(stated)
    right = equal(truth, answer) or (len(stated) > 1 and all(equal(truth, each) for each in _completed(stated)))
    return judged(right or _sentence_is_right(truth, stated) or _local_is_right(truth, tail, stated), answer)


def _in_words(truth: str, text: str, stated: list[str]) -> list[str] | None:
    """The choice or the word that a text states, if the ground truth is one; empty if it states no word. None: the
    stated answer is to be compared."""
    if is_choice(truth):
        return spoken.also_chosen(text) or (None if any(map(is_choice, stated)) else _chosen(text) or None)
    if words(clean(truth)) is None:
        return None
    if _marked(text) or tags(text):
        return stated if len(stated) == 1 else None
    if len(stated) == 1 and stated[0].startswith(r"\text"):  # the only formula of the last sentence
        return stated
    return spoken.ending(last_sentence(text))


def _chosen(text: str) -> list[str]:
    """The choice that the last sentence, else the last line, states."""
    lines = [line for line in text.splitlines() if line.strip()][-2:]
    is_question = len(lines) == 2 and all(map(spoken.is_labelled, lines))
    return [] if is_question else spoken.chosen(last_sentence(text)) or spoken.chosen(lines[-1] if lines else "")


def _is_said(truth: str, said: list[str]) -> bool:
    """True if the only choice or word of an answer is the ground truth."""
    phrase, answer = words(clean(truth)), said[0]
    if len(said) > 1:
        return False
    if phrase is None or equal(truth, answer):
        return equal(truth, answer)
    plain = words(clean(answer)) or ""
    return any(spoken.same_phrase(phrase, part) for part in (plain, *spoken.ending(plain)))


def _local_is_right(truth: str, text: str, stated: list[str]) -> bool:
    """True for a right ratio in words, "3 to 4", and a right decimal comma in a text that is not in English."""
    if len(stated) == 2 and ":" in truth and f"{stated[0]} to {stated[1]}" in text:
        return equal(truth, ":".join(stated))
    is_local = len(stated) == 1 and _DECIMAL_COMMA.fullmatch(stated[0]) and foreign_statements(text)
    return bool(is_local) and equal(truth, stated[0].replace(",", "."))


def _sentence_is_right(truth: str, stated: list[str]) -> bool:
    r"""True if the answer is a sentence, `\text{The answer is } 5`, that states the ground truth."""
    sentence = spoken.boxed_sentence(stated[0]) if len(stated) == 1 else None
    if sentence is None:
        return False
    if is_choice(truth) and (letters := spoken.chosen(sentence)):
        return letters == [truth.strip()] or (len(letters) == 1 and equal(truth, letters[0]))
    answers = _marked(sentence) or of_last_sentence(sentence)
    return bool(answers) and equal(truth, ", ".join(answers))


def _completed(stated: list[str]) -> list[str]:
    r"""The alternatives of an answer; `\approx 0.33` belongs to the first one, which must round to it."""
    return [f"{stated[0]} {other}" if other.startswith(r"\approx") else other for other in stated]


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
    tagged = tags(text)
    if _OPEN_BOX.search(text) and not (tagged or boxes(text)):
        return []  # cut off
    if not tagged or boxes(text[tagged[-1][1] :]):  # a box after it is later
        return _marked(text) or of_last_line(text) or of_last_sentence(text)
    *_, (_, end, last) = tagged
    stated = _marked(last) or of_last_line(last, alone=True) or ([last] if last else [])
    alternatives = joined_before(text, tagged) + offered(text, end)
    return [*stated, *(other for other in alternatives if other not in stated)]


def _marked(text: str) -> list[str]:
    """The answer in the last box, else after the last "the answer is"; or in a correction after it."""
    marked = [box for box in boxes(text) if not _DENIED_BEFORE.search(text, max(0, box[0] - 40), box[0])]
    rest = text[marked[-1][1] :] if marked else statement(text)
    if rest is None:
        return []
    if marked and _OPEN_ENDED.match(rest):
        return []
    correction = corrected(rest)
    if correction is not None:
        return [correction]
    if not marked and _ASKED.match(rest):
        return []
    return last_boxes(text, marked) if marked else by_cases(text) or of_sentence(rest)
