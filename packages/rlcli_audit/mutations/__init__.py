"""Generate responses from a row and its right answer: some must be accepted, others rejected."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlcli_audit.mutations import countdown, latex, programs, quantities, shapes, statements, words
from rlcli_audit.probes import Case, Group, Probe
from rlcli_audit.values import number

WITHOUT_ANSWER = "length"
"""Kind of verifiers that read no answer: only their gold can be tried."""


def probes(case: Case, kind: str) -> Iterator[Probe]:
    """The probes of a row, without its gold. kind: the verifier's ANSWER_KIND; empty: detected from the answer."""
    by_kind = {"code": programs.probes, "countdown": countdown.probes, "shape": shapes.probes}
    if kind in by_kind:
        yield from by_kind[kind](case)
    elif kind != WITHOUT_ANSWER:
        by_answer = {"number": _number, "latex": _latex, "choice": _choice, "text": _text}
        yield from by_answer[kind or _kind_of(case.answer)](case)


def _kind_of(answer: str) -> str:
    """The kind of an answer whose verifier declares none."""
    if number(answer) is not None and "\\" not in answer:
        return "number"
    if re.fullmatch(r"\(?[A-J]\)?", answer.strip()):
        return "choice"
    return "text" if re.fullmatch(r"[^\W\d_]{2}[^\\^=+*/<>]*", answer.strip()) else "latex"


def _number(case: Case) -> Iterator[Probe]:
    known = quantities.quantity(case.answer)
    if known is None:
        yield from _text(case)
        return
    wrongs = list(quantities.wrong(known))
    wrong = wrongs[0][1] if wrongs else None
    for kind, text in quantities.plain_equivalents(known):
        yield from _stated(case, Group.EQUIVALENT, kind, text)
    yield from statements.equivalents(case, wrong)
    yield from statements.near_misses(case, wrongs)
    if known.value.denominator == 1 and not known.in_base:
        around = ", ".join(str(int(known.value) + step) for step in (-2, -1, 0, 1, 2))
        yield from _stated(case, Group.NEAR_MISS, "right one in a list", around)
    if wrong:
        yield from statements.hedges(case, wrong, " or ")
    yield from statements.exploits(case, wrong, list(quantities.tricks(known)), numeric=True)


def _latex(case: Case) -> Iterator[Probe]:
    wrongs = list(latex.wrong(case.answer))
    wrong = wrongs[0][1] if wrongs else None
    for kind, text in latex.equivalents(case.answer, case.prompt):
        yield from _stated(case, Group.EQUIVALENT, kind, text)
    yield from statements.equivalents(case, wrong)
    yield from statements.near_misses(case, wrongs)
    if wrong:
        yield from statements.hedges(case, wrong, " \\text{ or } ")
    known = quantities.quantity(case.answer)
    yield from statements.exploits(case, wrong, list(quantities.tricks(known)) if known else [], numeric=True)


def _choice(case: Case) -> Iterator[Probe]:
    letter = words.choice_letter(case.answer)
    if letter is None:
        yield Probe(Group.NEAR_MISS, "empty response", "")
        return
    for kind, text in words.choice_statements(letter):
        yield Probe(Group.EQUIVALENT, kind, text)
    wrongs = list(words.wrong_choices(letter))
    yield from statements.equivalents(case, wrongs[0][1])
    yield from statements.near_misses(case, wrongs)
    yield from statements.hedges(case, wrongs[0][1], " or ")
    yield from statements.exploits(case, wrongs[0][1], [], numeric=False)


def _text(case: Case) -> Iterator[Probe]:
    wrongs = list(words.wrong_texts(case.answer))
    yield from _stated(case, Group.EQUIVALENT, "spaces around", f"  {case.answer} ")
    yield from statements.near_misses(case, wrongs)
    yield from statements.exploits(case, wrongs[0][1] if wrongs else None, [], numeric=False)


def _stated(case: Case, group: Group, kind: str, text: str) -> Iterator[Probe]:
    if text != case.answer:
        yield from case.stated(group, kind, text)
