"""Try verifiers on a few rows before anything loads: on the row's own answer, and on a response without an answer.

Every command that verifies does so. A verifier that crashes on all responses, or that rejects every right answer, is an
error at once, not after a step of generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from typing import TypeVar

from rlcli.errors import DataError, VerifierError
from rlcli.rewards.combine import SKIPS
from rlcli.rewards.crash import without_response
from rlcli.rewards.expression import Composition, Term, parse
from rlcli.rewards.gold_verifiers import NO_GOLD, STATED, gold_expression, without_answers
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.verifier_registry import target
from rlcli.types import UNVERIFIED, Outcome, Prompt, Verdict

ROWS, LOOKED_AT = 4, 256
"""Number of rows per verifier whose answers are tried, taken from this many first rows of the data."""

RESPONSES = 8
"""Number of responses that are tried before all of them are verified."""

FAILED = (Outcome.CRASH, Outcome.TIMEOUT)

FIX = "fix the verifier, or that row"

T = TypeVar("T")


@dataclass
class Answers:
    """The rows of each verifier whose answers are tried."""

    first: dict[str, list[Prompt]] = field(default_factory=dict)
    """Verifier → its first rows with an answer."""
    empty: dict[str, tuple[str, Prompt]] = field(default_factory=dict)
    """Verifier → its first row without an answer, with a name for messages."""

    def add(self, prompt: Prompt, position: int, name: Callable[[], str]) -> None:
        """Add a row if it is one of those to try. position: its index in the data. name: its name for messages."""
        if not prompt.ground_truth.strip():
            if prompt.verifier not in self.empty:
                self.empty[prompt.verifier] = (name(), prompt)
        elif position < LOOKED_AT and len(rows := self.first.setdefault(prompt.verifier, [])) < ROWS:
            rows.append(prompt)


def first_answers(rows: Iterable[Prompt]) -> Answers:
    """The rows to try, among the first `LOOKED_AT`. Verifiers that call a server are left out: each request costs, and
    their module has checked that the server answers."""
    answers = Answers()
    for position, prompt in enumerate(islice(rows, LOOKED_AT)):
        if not asks_server(prompt.verifier):
            answers.add(prompt, position, partial("row {}".format, prompt.id))
    return answers


@cache
def asks_server(verifier: str) -> bool:
    """True if one of the expression's verifiers sends responses to a server."""
    return any("url" in term.options for term in parse(verifier).terms)


def check_answers(answers: Answers, pool: ScoringPool, on_note: Callable[[str], None], group: int = 1) -> None:
    """Try each verifier on its rows. group: number of responses to a prompt, for a verifier that reads them together;
    the others have no answer.

    Raises `VerifierError` if one crashes or does not end in time on a row's answer or on a response without one;
    `DataError` if it rejects the answers of all its rows, or needs an answer that is empty. Notes rejected answers
    otherwise, verifiers that apply to none of their rows, and those that cannot be tried. Of a sum, the first verifier
    alone is tried on the answers. If its module has no `gold` that writes an answer as a response, only crashes are
    found. One that calls a server does not get responses without an answer: each request costs.
    """
    compositions = {verifier: parse(verifier).located() for verifier in {**answers.first, **answers.empty}}
    terms: dict[str, Term] = {}
    for verifier, composition in compositions.items():
        if why := _untried(composition.terms[0]):
            on_note(f"{verifier} is not tried: {why}")
        else:
            terms[verifier] = composition.terms[0]
    golds = {verifier: gold_expression(target(term.ref), term, group) for verifier, term in terms.items()}
    first = {verifier: rows for verifier, rows in answers.first.items() if verifier in terms}
    stated = {
        verifier: [pool.submit(golds[verifier], prompt.request()) for prompt in rows]
        for verifier, rows in first.items()
    }
    plain = {
        verifier: [_submit_plain(pool, verifier, prompt, group) for prompt in rows]
        for verifier, rows in first.items()
        if not asks_server(verifier) and not any(map(_untried, compositions[verifier].terms))
    }
    for verifier, futures in stated.items():
        _check_golds(terms[verifier], first[verifier], futures, on_note)
    for verifier, futures in plain.items():
        skipped = all(SKIPS in future.result().detail for future in stated[verifier])
        verdicts = [future.result() for future in futures]
        if group > 1 and verifier in pool.grouped and any(verdict.outcome in FAILED for verdict in verdicts):
            # The error on one response says more, if there is one.
            alone = [_submit_plain(pool, verifier, prompt, 1) for prompt in first[verifier]]
            single = [future.result() for future in alone]
            verdicts = single if any(verdict.outcome in FAILED for verdict in single) else verdicts
        _check_plain(compositions[verifier], first[verifier], verdicts, skipped, on_note)
    for verifier, (row, prompt) in answers.empty.items():
        if verifier in terms:
            _check_empty(terms[verifier], row, pool.submit(golds[verifier], prompt.request()).result())


def check_responses(
    items: Sequence[T], describe: Callable[[T], str], submit: Callable[[T], tuple[str, Future[Verdict]]]
) -> None:
    """Raise `VerifierError` if verifiers crash on all of `RESPONSES` responses, before any other is verified.

    They are spread over the first `LOOKED_AT`: neighbours often answer one prompt, which may be the only one that a
    verifier cannot judge. describe: a response's name for messages. submit: its verifier and its future verdict.
    """
    first = items[:LOOKED_AT]
    tried = [first[index * len(first) // RESPONSES] for index in range(RESPONSES)] if len(first) > RESPONSES else first
    submitted = [submit(item) for item in tried]
    verdicts = [future.result() for _, future in submitted]
    if verdicts and all(verdict.outcome is Outcome.CRASH for verdict in verdicts):
        count = f"each of the {len(verdicts)} responses that were tried" if len(verdicts) > 1 else "the only response"
        raise VerifierError(
            f"the verifier '{submitted[0][0]}' crashes on {count}; on {describe(tried[0])}: {verdicts[0].detail}",
            "fix the verifier, or these rows",
        )


def _untried(term: Term) -> str:
    """The reason why a verifier cannot be tried on one answer before the run; empty if it can."""
    if term.serves is not None:
        return "its model is served when the run starts"
    return "it compares the responses of a group" if term.other_responses else ""


def _submit_plain(pool: ScoringPool, verifier: str, prompt: Prompt, group: int) -> Future[Verdict]:
    """Verify a response without an answer, with others like it if the verifier reads them together."""
    first, *_ = pool.submit_together(
        verifier, without_answers(prompt.request(), group if verifier in pool.grouped else 1)
    )
    return first


def _check_golds(
    term: Term, prompts: Sequence[Prompt], futures: Sequence[Future[Verdict]], on_note: Callable[[str], None]
) -> None:
    rejected: list[str] = []
    for prompt, future in zip(prompts, futures, strict=True):
        row, verdict = f"row {prompt.id}, whose ground truth is {prompt.ground_truth!r:.80}", future.result()
        if verdict.outcome in UNVERIFIED:
            raise VerifierError(
                f"the verifier '{term.verifier}' fails ({verdict.outcome}) on {row}: {verdict.detail}", FIX
            )
        if _rejects(verdict):
            rejected.append(f"{row} ({verdict.detail.removeprefix(f'{STATED}: ')})")
    if rejected and len(rejected) == len(prompts):
        raise DataError(
            f"the verifier '{term.verifier}' rejects the answers of the first {len(prompts)} rows: {rejected[0]}",
            "give the verifier that these rows are for (--verifier), or fix their ground truth",
        )
    if rejected:
        on_note(
            f"warning: the verifier '{term.verifier}' rejects the answers of {len(rejected)} of the first "
            f"{len(prompts)} rows: {rejected[0]}; fix them: no response to such a row is ever rewarded"
        )


def _check_plain(
    composition: Composition,
    prompts: Sequence[Prompt],
    verdicts: Sequence[Verdict],
    skipped: bool,
    on_note: Callable[[str], None],
) -> None:
    """skipped: the verifier returned None for the rows' answers."""
    for prompt, verdict in zip(prompts, verdicts, strict=True):
        if verdict.outcome in FAILED:
            raise VerifierError(
                f"the verifier '{composition}' fails ({verdict.outcome}) on row {prompt.id}: {verdict.detail}", FIX
            )
    if skipped and all(verdict.detail.startswith(SKIPS) for verdict in verdicts):
        on_note(
            f"warning: the verifier '{composition}' returned None for the first {len(prompts)} rows, which means that "
            "it does not apply to them; return 0.0 for a response that is wrong"
        )


def _check_empty(term: Term, row: str, verdict: Verdict) -> None:
    if verdict.outcome in UNVERIFIED or _rejects(verdict) or NO_GOLD in verdict.detail:
        raise DataError(
            f"data: the ground truth of {row} is empty, and the verifier '{term.verifier}' needs one "
            f"({verdict.outcome}: {without_response(verdict.detail.removeprefix(f'{STATED}: '))})",
            "write it, or leave that row out",
        )


def _rejects(verdict: Verdict) -> bool:
    """True if the row's answer, written as a response, is wrong. A penalty, at most 0, never rejects."""
    return verdict.detail.startswith(STATED) and verdict.outcome is not Outcome.OK and not verdict.score > 0
