"""The extra checks of `--dry-run`: each weight, each row, verifiers on the first answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rlcli.config.rules import without_effect
from rlcli.data.prompts.table import JoinedPrompts, PromptTable
from rlcli.errors import DataError, VerifierError
from rlcli.launch.planning.summary import setting_of_run
from rlcli.launch.preflight import Prepared
from rlcli.planner.asynchrony.advice import advice
from rlcli.scoring.expression import Term, parse
from rlcli.scoring.golds import STATED, gold_expression
from rlcli.scoring.processes.pool import ScoringPool
from rlcli.scoring.registry import target
from rlcli.types import UNVERIFIED, Outcome, Prompt, Verdict

ROWS, LOOKED_AT = 4, 256
"""Number of rows per verifier whose answers are tried, taken from this many first rows of the data."""


def try_out(prepared: Prepared, on_note: Callable[[str], None]) -> None:
    """Raise an `RlcliError` for what would fail, or could not be learned from, after the start of the run."""
    from rlcli.model.io.facts import check_lora, check_weights

    config = prepared.config
    for note in without_effect(config):
        on_note(note)
    if (plan := setting_of_run(prepared)) and (asynchrony := advice(plan)):
        on_note(f"asynchrony: {asynchrony.told} (simulated; responses {asynchrony.lengths})")
    if config.lora.rank:
        check_lora(config.model.path, config.lora.targets)
    models = (config.model.path, config.critic.path, *(one.path for one in config.teacher.held))
    for path in dict.fromkeys(filter(None, models)):
        check_weights(path, on_note)
    sets = [prepared.prompts.prompts, *([prepared.held_out.prompts] if prepared.held_out else [])]
    found = [check_not_empty(rows, on_note) for rows in sets]
    if prepared.verifiers and not config.data.response:
        for answers in found:
            check_golds(answers, config.verifier.deadline_s, prepared.sandbox, on_note)


@dataclass
class Answers:
    """The rows of each verifier whose answers are tried: its first ones, and its first without an answer, with a name
    for messages."""

    first: dict[str, list[Prompt]] = field(default_factory=dict)
    empty: dict[str, tuple[str, Prompt]] = field(default_factory=dict)


def check_not_empty(rows: Iterable[Prompt], on_note: Callable[[str], None]) -> Answers:
    """Raise `DataError` for a prompt without text; note answers without text. `check_golds` refuses answers that the
    row's verifier cannot score."""
    found, without = Answers(), list[str]()
    for place, prompt in enumerate(rows):
        if not any(message["content"].strip() for message in prompt.messages):
            raise DataError(f"data: the prompt of {_named(rows, place, prompt)} is empty", "write it, or leave it out")
        if not prompt.ground_truth.strip():
            without.append(prompt.id)
            if prompt.verifier not in found.empty:
                found.empty[prompt.verifier] = (_named(rows, place, prompt), prompt)
        elif place < LOOKED_AT and len(some := found.first.setdefault(prompt.verifier, [])) < ROWS:
            some.append(prompt)
    if without:
        on_note(f"{len(without)} rows have an empty ground truth, {without[0]} the first")
    return found


def _named(rows: Iterable[Prompt], place: int, prompt: Prompt) -> str:
    """A row with its file, if that is known."""
    if isinstance(rows, JoinedPrompts):
        part = int(rows.starts.searchsorted(place, side="right")) - 1
        return _named(rows.parts[part], place - int(rows.starts[part]), prompt)
    if isinstance(rows, PromptTable):
        return f"row {prompt.id} of {rows.origin.file}"
    return f"row {prompt.id}"


def check_golds(answers: Answers, deadline_s: float, sandbox: str, on_note: Callable[[str], None]) -> None:
    """Try each verifier on its rows' answers, in scoring processes.

    For a sum, only the first verifier is tried. Raises `VerifierError` if one crashes or does not end in `deadline_s`
    seconds, and `DataError` if it rejects the answers of all its rows, or needs an answer that is empty; notes rejected
    answers otherwise, and verifiers that cannot be tried. If its module has no `gold` that writes an answer as a
    response, only crashes are found.
    """
    first = {verifier: parse(verifier).located().terms[0] for verifier in {**answers.first, **answers.empty}}
    untried = {verifier: why for verifier, term in first.items() if (why := _untried(term))}
    terms = {verifier: term for verifier, term in first.items() if verifier not in untried}
    for verifier, why in untried.items():
        on_note(f"{verifier} is not tried: {why}")
    expressions = {verifier: gold_expression(target(term.ref), term) for verifier, term in terms.items()}
    with ScoringPool(1, deadline_s, sorted(set(expressions.values())), sandbox) as pool:

        def submit(prompt: Prompt) -> Future[Verdict]:
            return pool.submit(expressions[prompt.verifier], prompt.request())

        tried = {verifier: some for verifier, some in answers.first.items() if verifier in terms}
        waiting = {verifier: [submit(prompt) for prompt in some] for verifier, some in tried.items()}
        empty = {verifier: one for verifier, one in answers.empty.items() if verifier in terms}
        lacking = [(verifier, row, submit(prompt)) for verifier, (row, prompt) in empty.items()]
        for verifier, futures in waiting.items():
            _judge(terms[verifier], answers.first[verifier], [future.result() for future in futures], on_note)
        for verifier, row, future in lacking:
            _judge_empty(terms[verifier], row, future.result())


def _untried(term: Term) -> str:
    """Why a verifier cannot be tried on one answer before the run; empty if it can."""
    if term.serves is not None:
        return "its model is served when the run starts"
    return "it compares the responses of a group" if term.rivals else ""


def _judge_empty(term: Term, row: str, verdict: Verdict) -> None:
    if verdict.outcome in UNVERIFIED or _rejects(verdict):
        raise DataError(
            f"data: the ground truth of {row} is empty, and the verifier '{term.verifier}' needs one "
            f"({verdict.outcome}: {verdict.detail.removeprefix(f'{STATED}: ')})",
            "write it, or leave that row out",
        )


def _rejects(verdict: Verdict) -> bool:
    """Whether the row's own answer, written as a response, is wrong. A penalty, at most 0, never rejects."""
    return verdict.detail.startswith(STATED) and verdict.outcome is not Outcome.OK and not verdict.score > 0


def _judge(term: Term, prompts: Sequence[Prompt], verdicts: Sequence[Verdict], on_note: Callable[[str], None]) -> None:
    refused: list[str] = []
    for prompt, verdict in zip(prompts, verdicts, strict=True):
        row = f"row {prompt.id}, whose ground truth is {prompt.ground_truth!r:.80}"
        if verdict.outcome in UNVERIFIED:
            raise VerifierError(
                f"the verifier '{term.verifier}' fails ({verdict.outcome}) on {row}: {verdict.detail}",
                "fix the verifier, or that row",
            )
        if _rejects(verdict):
            refused.append(f"{row} ({verdict.detail.removeprefix(f'{STATED}: ')})")
    if refused and len(refused) == len(prompts):
        raise DataError(
            f"the verifier '{term.verifier}' rejects the answers of the first {len(prompts)} rows: {refused[0]}",
            "give the verifier that these rows are for (--verifier), or fix their ground truth",
        )
    if refused:
        on_note(
            f"warning: the verifier '{term.verifier}' rejects the answers of {len(refused)} of the first "
            f"{len(prompts)} rows: {refused[0]}; fix them: no response to such a row is ever rewarded"
        )
