"""Verifiers that take the row's reference answer, in a scoring process and within its deadline: one runs another
verifier on it, one has a module's `gold` write it as a response."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rlcli.scoring.crash import describe, with_response
from rlcli.scoring.expression import Composition, Term
from rlcli.scoring.load import Part, Scorer, find, load
from rlcli.types import Outcome, Verdict, VerifyRequest

TRIED, STATED = "tried", "stated"
"""Prefixes of a verdict's detail: either the verifier's module has written the response that must score (`gold`), or
the ground truth itself was tried, which only shows whether the verifier crashes."""
NO_GOLD = ", its gold: "
"""In such a detail, before the reason why the module's `gold` cannot write a response for the row."""


@dataclass(frozen=True, slots=True)
class GoldResponse(Verdict):
    """A verdict whose answer is a whole response, which must reach the audit as it is: it is not shortened."""


def write_gold(request: VerifyRequest, *, target: str) -> GoldResponse:
    """The response with the row's answer that `gold` writes, of the module that has the verifier `target`: the answer
    of the verdict; None if it writes none. Raises what `gold` raises, and `TypeError` for anything but text."""
    module, _ = find(target)
    response = module.gold(request)
    if response is not None and not isinstance(response, str):
        raise TypeError(f"gold returned {response!r:.60}, not text")
    return GoldResponse(1.0, Outcome.OK, answer=response or None)


def by_gold(request: VerifyRequest, *, target: str, options: str) -> Verdict:
    """The verdict of the verifier at `target` (`module:attribute` or `/path/file.py:attribute`) on the row's reference
    answer. options: the verifier's, as JSON. Raises what it raises."""
    gold, scorer = _loaded(target, options)
    completion, how = request.ground_truth, TRIED
    why = ""
    if gold:
        try:
            completion, how = gold(request), STATED
        except Exception as error:  # the row has no answer to state; whether the verifier can score it, it shows itself
            why = f"{NO_GOLD}{describe(error)}"
    # There is no tokenizer here: verifiers that count tokens get one token per word.
    ids = tuple(range(len(completion.split())))
    stating = replace(request, completion=completion, completion_ids=ids, finish_reason="stop")
    try:
        (found,) = scorer.verify([stating])
    except BaseException as error:
        raise with_response(error, completion) from None
    if isinstance(found, BaseException):
        raise with_response(found, completion)
    if found is None:
        return Verdict(0.0, Outcome.WRONG, detail=TRIED)
    return replace(found, detail=f"{how}: {found.outcome}" + (f", {found.detail}" if found.detail else "") + why)


def gold_expression(target: str, term: Term) -> str:
    """The expression with which `by_gold` tries the verifier of `term`, which is defined at `target`."""
    options = {"target": target, "options": json.dumps(dict(term.options))}
    return str(Composition((Term("rlcli.scoring.golds:by_gold", options),)))


def gold_writer(target: str) -> str:
    """The expression of `write_gold` for the verifier at `target`."""
    return str(Composition((Term("rlcli.scoring.golds:write_gold", {"target": target}),)))


@cache
def _loaded(target: str, options: str) -> tuple[Any, Scorer]:
    module, _ = find(target)
    part = Part(target.rpartition(":")[2], target, json.loads(options), 1.0)
    return getattr(module, "gold", None), load(target, [part], is_sum=False)
