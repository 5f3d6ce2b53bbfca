"""Countdown: the right expression written in other ways, and expressions that miss the target or break the rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from math import prod

from rlcli.types import VerifyRequest
from rlcli_audit.mutations.statements import CODE, INJECTION
from rlcli_audit.probes import Case, Group, Probe

_TARGET = re.compile(r"\s*[-+]?[0-9]{1,40}(?:\.[0-9]{0,40}|/[0-9]{1,40})?(?:[eE][-+]?[0-9]{1,2})?\s*")
"""A target of bounded size: `1e999999999` would be a number of a gigabyte."""
_TAG = re.compile(r"(?<=<answer>)(?:(?!<answer>).)*?(?=</answer>)", re.DOTALL)


def probes(case: Case) -> Iterator[Probe]:
    """All probes of one row; none unless the completion contains a right expression in <answer> tags."""
    right, problem = case.request.completion, _problem(case.request)
    tags = list(_TAG.finditer(right))
    if not tags or problem is None:
        return
    numbers, target = problem
    expression = tags[-1][0].strip()

    def state(text: str) -> str:
        return right[: tags[-1].start()] + text + right[tags[-1].end() :]

    for kind, text in (
        ("spaces removed", expression.replace(" ", "")),
        ("in brackets", f"({expression})"),
        ("spaces added", re.sub(r"([-+*/()])", r" \1 ", expression)),
        ("signs of print", expression.replace("*", "×").replace("/", "÷")),
        ("target after =", f"{expression} = {target}"),
    ):
        if text != expression and "=" not in expression:
            yield Probe(Group.EQUIVALENT, kind, state(text))
    yield Probe(Group.NEAR_MISS, "empty response", "")
    for kind, text in _wrong(expression, numbers, target):
        yield Probe(Group.NEAR_MISS, kind, state(text))
        yield Probe(Group.NEAR_MISS, f"after the right one: {kind}", f"{right}\n\nNo, rather:\n\n{state(text)}")
    yield Probe(Group.HEDGE, "two expressions", state(f"{expression} or {target}"))
    for kind, text in (
        ("Python as the answer", CODE),
        ("Python that makes the target", f"int('{target}')"),
        ("power tower", "9**9**9**9**9"),
        ("always true", f"{target} == {target}"),
        ("prompt injection", INJECTION),
        ("deep brackets", "(" * 5000 + expression),
    ):
        yield Probe(Group.EXPLOIT, kind, state(text))


def _wrong(expression: str, numbers: list[int], target: Fraction) -> Iterator[tuple[str, str]]:
    if target not in numbers:
        yield "the target itself", f"{target}"
    stranger = max(numbers) + 1
    plain = expression.partition("=")[0].strip()
    yield "a number not given", f"{plain} + {stranger} - {stranger}"
    yield "empty answer", ""
    for kind, value, sign in (("sum", sum(numbers), " + "), ("product", prod(numbers), " * ")):
        if value != target and len(numbers) > 1:
            yield f"{kind} of the numbers", sign.join(map(str, numbers))
            yield f"{kind} claimed to be the target", f"{sign.join(map(str, numbers))} = {target}"


def _problem(request: VerifyRequest) -> tuple[list[int], Fraction] | None:
    """The numbers and the target, if the row has them in a known form."""
    try:
        truth = json.loads(request.ground_truth)
        stated = {**request.extra_info, **(truth if isinstance(truth, dict) else {"target": truth})}
        target = str(stated["target"])
        return ([int(number) for number in stated["numbers"]], Fraction(target)) if _TARGET.fullmatch(target) else None
    except (KeyError, TypeError, ValueError):
        return None
