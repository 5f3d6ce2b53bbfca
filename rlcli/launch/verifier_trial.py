"""Loads a run's verifiers once before the model, and tries them, so that their problems are early errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rlcli.config.schema import VerifierSection
from rlcli.data.prompts.prompt_table import verifiers_of
from rlcli.errors import ConfigError, DataError, UnknownName, VerifierError
from rlcli.rewards.expression import Composition, other_responses_of, parse
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.trial import check_answers, first_answers
from rlcli.rewards.verifier_checks import check_loaded, key_notes
from rlcli.rewards.verifier_registry import target
from rlcli.support.sandbox_name import backend_name
from rlcli.types import Prompt


def check_verifiers(
    rows: Sequence[Prompt],
    section: VerifierSection,
    on_note: Callable[[str], None] = lambda text: None,
    *,
    tried: Sequence[Sequence[Prompt]] = (),
    converses: bool = False,
    loads: bool = True,
    oversample: float = 1.0,
    group: int = 1,
) -> tuple[tuple[str, ...], str]:
    """Load the verifiers that the rows name, in a separate process since plugin code never runs here, open the sandbox
    if one of them runs programs, and try them on the first rows of each of `tried` (`scoring.trial`).

    converses: responses are conversations with an environment, which the rows that are tried lack: what fails then is
    only noted. loads: False checks names alone. oversample: `rollout.oversample`. group: responses to a prompt.

    Returns the expressions, each once, and the name of the sandbox's backend, tested here; empty if none needs it.
    on_note: receives which key goes to which address.
    Raises `VerifierError` for a verifier that is unknown, does not load or crashes, `ConfigError` for an option that it
    does not take or a `timeout_s` beyond its deadline, `SetupError` if the sandbox does not work, and `DataError` for
    answers that their verifier rejects.
    """
    first = verifiers_of(rows)
    compositions = {expression: parse(expression) for expression in sorted(first)}
    for expression, composition in compositions.items():
        _check_names(composition, first[expression] if parse(section.name).names_rows_own else "")
    backend = backend_name("" if section.sandbox == "auto" else section.sandbox)
    if not (compositions and loads):
        return tuple(compositions), ""
    with ScoringPool(1, section.deadline_s, tuple(compositions), backend) as pool:
        for note in key_notes(pool.loaded):
            on_note(note)
        sandbox = check_loaded(pool.loaded, section.deadline_s, backend, "verifier.deadline_s")
        if pool.grouped and converses and oversample > 1:  # finished conversations do not wait for the next step
            raise ConfigError(
                f"{pool.grouped[0]} reads the responses to a prompt together, but rollout.oversample = {oversample:g} "
                "may finish the conversations of a group in different steps",
                "set rollout.oversample=1",
            )
        for some in tried:
            try:
                check_answers(first_answers(some), pool, on_note, group)
            except (DataError, VerifierError) as error:
                if not converses:
                    raise
                on_note(f"{error.message} (tried without its environment)")
    return tuple(compositions), sandbox


def check_comparisons(expressions: Iterable[str], samples: str, count: int, oversample: float = 1.0) -> None:
    """Raise `ConfigError` if a verifier compares the responses of a group and there are none to compare. samples: the
    key of their number, `count`."""
    for expression in expressions:
        if other_responses_of(expression) and count < 2:
            raise ConfigError(
                f"{expression} compares the responses of a group, but {samples} = {count}",
                "give 2 or more",
            )
        if other_responses_of(expression) and oversample > 1:
            raise ConfigError(
                f"{expression} compares the responses of a group, but rollout.oversample = {oversample:g} may generate "
                "them in different steps",
                "set rollout.oversample=1, or other_responses=0",
            )


def refuse_comparisons(expressions: Iterable[str], where: str) -> None:
    """Raise `ConfigError` if a verifier compares the responses of a group. where: what has no groups."""
    for expression in expressions:
        if other_responses_of(expression):
            raise ConfigError(
                f"{expression} compares the responses of a group, but {where} has none", "give other_responses=0"
            )


def _check_names(composition: Composition, row: str) -> None:
    """Raise `VerifierError` for an unknown verifier. row: the first that names it; empty: the user did."""
    for term in composition.terms:
        try:
            target(term.ref)
        except UnknownName as error:
            raise VerifierError(error.message + (f" (row {row})" if row else ""), error.hint) from None
