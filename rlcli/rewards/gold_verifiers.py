"""Verifiers of a row's reference answer, run in a scoring process under its deadline.

`by_gold` runs another verifier on that answer; `write_gold` returns the response that a module's `gold` writes for it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from rlcli.rewards.combine import Verified
from rlcli.rewards.crash import describe, with_response
from rlcli.rewards.expression import Composition, Term
from rlcli.rewards.verifier_loading import Part, Scorer, find, load
from rlcli.types import Outcome, Verdict, VerifyRequest

TRIED, STATED = "tried", "stated"
"""Prefixes of a verdict's detail. STATED: the verifier's module wrote the response that must score (`gold`). TRIED: the
ground truth itself was verified, which only shows whether the verifier crashes."""
NO_GOLD = ", its gold: "
"""In such a detail, before the reason why the module's `gold` cannot write a response for the row."""
WITHOUT_ANSWER = "I do not know."
"""A response that gives no answer, as any policy writes some."""


@dataclass(frozen=True, slots=True)
class GoldResponse(Verdict):
    """A verdict whose answer is a complete response, which is not shortened on its way to the audit."""


def write_gold(request: VerifyRequest, *, target: str, options: str) -> GoldResponse:
    """Have the module of the verifier `target` write a response with the row's answer (`gold`).

    The response is the verdict's answer; None if `gold` writes none. options: the verifier's, as JSON. Raises what
    `gold` raises, and `TypeError` for anything but text.
    """
    module, _ = find(target)
    response = module.gold(request, **_gold_options(module.gold, json.loads(options)))
    if response is not None and not isinstance(response, str):
        raise TypeError(f"gold returned {response!r:.60}, not text")
    return GoldResponse(1.0, Outcome.OK, answer=response or None)


def by_gold(request: VerifyRequest, *, target: str, options: str, group: int = 1) -> Verdict:
    """The verdict of the verifier at `target` (`module:attribute` or `/path/file.py:attribute`) on the row's reference
    answer.

    options: the verifier's, as JSON. group: number of responses in the call, for a verifier that reads all responses to
    a prompt together; the others have no answer. Raises what the verifier raises.
    """
    gold, scorer = _loaded(target, options)
    gold_options = _gold_options(gold, json.loads(options)) if gold else {}
    completion, prefix = request.ground_truth, TRIED
    gold_error = ""
    if gold:
        try:
            completion, prefix = gold(request, **gold_options), STATED
        except Exception as error:  # the row has no answer to state; the verifier may still be able to score it
            gold_error = f"{NO_GOLD}{describe(error)}"
    # There is no tokenizer here: verifiers that count tokens get one token per word.
    ids = tuple(range(len(completion.split())))
    gold_request = replace(request, completion=completion, completion_ids=ids, finish_reason="stop")
    others = without_answers(request, group)[1:] if scorer.groups else []
    result = _first(scorer, [gold_request, *others])
    if isinstance(result, BaseException) and others:  # the error on this response alone says more, if there is one
        alone = _first(scorer, [gold_request])
        result = alone if isinstance(alone, BaseException) else result
    if isinstance(result, BaseException):
        raise with_response(result, completion) from None
    if result is None:
        return Verdict(0.0, Outcome.WRONG, detail=TRIED)
    return replace(
        result, detail=f"{prefix}: {result.outcome}" + (f", {result.detail}" if result.detail else "") + gold_error
    )


def by_row(request: VerifyRequest, *, target: str) -> Verdict:
    """OK if the module of the verifier at `target` accepts the row (`check_row`, which runs no program); else WRONG,
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
    options: dict[str, object] = {"target": target, "options": json.dumps(dict(term.options))}
    options |= {"group": group} if group > 1 else {}
    return str(Composition((Term("rlcli.rewards.gold_verifiers:by_gold", options),)))


def _gold_options(gold: Callable[..., object], options: Mapping[str, object]) -> dict[str, object]:
    """The options of a verifier that its module's `gold` takes too: those that decide which response is right."""
    parameters = inspect.signature(gold).parameters
    return {name: value for name, value in options.items() if name in parameters}


def gold_writer(target: str, term: Term) -> str:
    """The expression of `write_gold` for the verifier of `term`, which is defined at `target`."""
    options = {"target": target, "options": json.dumps(dict(term.options))}
    return str(Composition((Term("rlcli.rewards.gold_verifiers:write_gold", options),)))


@cache
def _loaded(target: str, options: str) -> tuple[Callable[..., str] | None, Scorer]:
    module, _ = find(target)
    part = Part(target.rpartition(":")[2], target, json.loads(options), 1.0)
    return getattr(module, "gold", None), load(target, [part], is_sum=False)
