"""Verifiers that take the row's reference answer, in a scoring process and within its deadline: one runs another
verifier on it, one has a module's `gold` write it as a response."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rlcli.rewards.combine import Verified
from rlcli.rewards.crash import describe, with_response
from rlcli.rewards.expression import Composition, Term
from rlcli.rewards.verifier_loading import Part, Scorer, find, load
from rlcli.types import Outcome, Verdict, VerifyRequest

TRIED, STATED = "tried", "stated"
"""Prefixes of a verdict's detail: either the verifier's module has written the response that must score (`gold`), or
the ground truth itself was tried, which only shows whether the verifier crashes."""
NO_GOLD = ", its gold: "
"""In such a detail, before the reason why the module's `gold` cannot write a response for the row."""
WITHOUT_ANSWER = "I do not know."
"""A response that gives no answer, as any policy writes some."""


@dataclass(frozen=True, slots=True)
class GoldResponse(Verdict):
    """A verdict whose answer is a whole response, which must reach the audit as it is: it is not shortened."""


def write_gold(request: VerifyRequest, *, target: str, options: str) -> GoldResponse:
    """The response with the row's answer that `gold` writes, of the module that has the verifier `target`: the answer
    of the verdict; None if it writes none. options: the verifier's, as JSON. Raises what `gold` raises, and `TypeError`
    for anything but text."""
    module, _ = find(target)
    response = module.gold(request, **_taken(module.gold, json.loads(options)))
    if response is not None and not isinstance(response, str):
        raise TypeError(f"gold returned {response!r:.60}, not text")
    return GoldResponse(1.0, Outcome.OK, answer=response or None)


def by_gold(request: VerifyRequest, *, target: str, options: str, group: int = 1) -> Verdict:
    """The verdict of the verifier at `target` (`module:attribute` or `/path/file.py:attribute`) on the row's reference
    answer. options: the verifier's, as JSON. group: with so many responses it is called, if it reads those to a prompt
    together; the others have no answer. Raises what it raises."""
    gold, scorer = _loaded(target, options)
    gold_options = _taken(gold, json.loads(options)) if gold else {}
    completion, how = request.ground_truth, TRIED
    why = ""
    if gold:
        try:
            completion, how = gold(request, **gold_options), STATED
        except Exception as error:  # the row has no answer to state; whether the verifier can score it, it shows itself
            why = f"{NO_GOLD}{describe(error)}"
    # There is no tokenizer here: verifiers that count tokens get one token per word.
    ids = tuple(range(len(completion.split())))
    stating = replace(request, completion=completion, completion_ids=ids, finish_reason="stop")
    others = without_answers(request, group)[1:] if scorer.groups else []
    found = _first(scorer, [stating, *others])
    if isinstance(found, BaseException) and others:  # the error on this response alone says more, if there is one
        alone = _first(scorer, [stating])
        found = alone if isinstance(alone, BaseException) else found
    if isinstance(found, BaseException):
        raise with_response(found, completion) from None
    if found is None:
        return Verdict(0.0, Outcome.WRONG, detail=TRIED)
    return replace(found, detail=f"{how}: {found.outcome}" + (f", {found.detail}" if found.detail else "") + why)


def by_row(request: VerifyRequest, *, target: str) -> Verdict:
    """OK if the module of the verifier at `target` can read the row (`check_row`), which runs no program; else WRONG,
    with the reason."""
    module, _ = find(target)
    try:
        module.check_row(request)
    except ValueError as error:
        return Verdict(0.0, Outcome.WRONG, detail=f"{STATED}: {error}")
    return Verdict(1.0, Outcome.OK)


def row_expression(target: str) -> str:
    """The expression with which `by_row` reads the rows of the verifier at `target`."""
    return str(Composition((Term("rlcli.rewards.gold_verifiers:by_row", {"target": target}),)))


def _first(scorer: Scorer, requests: list[VerifyRequest]) -> Verified:
    """The result for the first of the requests, or the exception that was raised."""
    try:
        return scorer.verify(requests)[0]
    except BaseException as error:
        return error


def without_answers(request: VerifyRequest, count: int) -> list[VerifyRequest]:
    """Different responses to a prompt, each without an answer."""
    # There is no tokenizer here: verifiers that count tokens get one token per word.
    texts = [WITHOUT_ANSWER, *(f"{WITHOUT_ANSWER} ({number})" for number in range(2, count + 1))]
    return [
        replace(request, completion=text, completion_ids=range(len(text.split())), finish_reason="stop")
        for text in texts
    ]


def gold_expression(target: str, term: Term, group: int = 1) -> str:
    """The expression with which `by_gold` tries the verifier of `term`, which is defined at `target`."""
    options: dict[str, Any] = {"target": target, "options": json.dumps(dict(term.options))}
    options |= {"group": group} if group > 1 else {}
    return str(Composition((Term("rlcli.rewards.gold_verifiers:by_gold", options),)))


def _taken(gold: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a verifier that its module's `gold` takes too: those that decide which response is right."""
    parameters = inspect.signature(gold).parameters
    return {name: value for name, value in options.items() if name in parameters}


def gold_writer(target: str, term: Term) -> str:
    """The expression of `write_gold` for the verifier of `term`, which is defined at `target`."""
    options = {"target": target, "options": json.dumps(dict(term.options))}
    return str(Composition((Term("rlcli.rewards.gold_verifiers:write_gold", options),)))


@cache
def _loaded(target: str, options: str) -> tuple[Any, Scorer]:
    module, _ = find(target)
    part = Part(target.rpartition(":")[2], target, json.loads(options), 1.0)
    return getattr(module, "gold", None), load(target, [part], is_sum=False)
