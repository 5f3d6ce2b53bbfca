"""Loads a run's verifiers once before the model, so that a missing plugin or option is an early error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

from rlcli.config.schema import VerifierSection
from rlcli.data.prompts.table import verifiers_of
from rlcli.errors import ConfigError, UnknownName, VerifierError
from rlcli.sandbox import backend_name
from rlcli.scoring.checking import check_loaded, key_notes
from rlcli.scoring.expression import Composition, parse, rivals_of
from rlcli.scoring.processes.fork_server import ForkServer
from rlcli.scoring.registry import target
from rlcli.types import Prompt


def check_verifiers(
    rows: Sequence[Prompt], section: VerifierSection, on_note: Callable[[str], None] = lambda text: None
) -> tuple[tuple[str, ...], str]:
    """Load the verifiers that the rows name, in a separate process since plugin code never runs here, and open the
    sandbox if one of them runs programs.

    Returns the expressions, each once, and the name of the sandbox's backend, tested here; empty if none needs it.
    on_note: told which key goes to which address.
    Raises `VerifierError` for a verifier that is unknown or does not load, `ConfigError` for an option that it does
    not take or a `timeout_s` beyond its deadline, and `SetupError` if the sandbox does not work.
    """
    first = verifiers_of(rows)
    compositions = {expression: parse(expression) for expression in sorted(first)}
    for expression, composition in compositions.items():
        _check_names(composition, first[expression] if parse(section.name).names_rows_own else "")
    backend = backend_name("" if section.sandbox == "auto" else section.sandbox)
    with contextlib.closing(ForkServer(backend)) as fork_server:
        loaded = {name: fork_server.load(composition) for name, composition in compositions.items()}
    for note in key_notes(loaded):
        on_note(note)
    return tuple(compositions), check_loaded(loaded, section.deadline_s, backend, "verifier.deadline_s")


def check_rivals(expressions: Iterable[str], samples: str, count: int, oversample: float = 1.0) -> None:
    """Raise `ConfigError` if a verifier compares the responses of a group and there are none to compare. samples: the
    key of their number, `count`."""
    for expression in expressions:
        if rivals_of(expression) and count < 2:
            raise ConfigError(
                f"{expression} compares the responses of a group, but {samples} = {count}",
                "give 2 or more",
            )
        if rivals_of(expression) and oversample > 1:
            raise ConfigError(
                f"{expression} compares the responses of a group, but rollout.oversample = {oversample:g} may generate "
                "them in different steps",
                "set rollout.oversample=1, or rivals=0",
            )


def refuse_rivals(expressions: Iterable[str], where: str) -> None:
    """Raise `ConfigError` if a verifier compares the responses of a group. where: what has no groups."""
    for expression in expressions:
        if rivals_of(expression):
            raise ConfigError(f"{expression} compares the responses of a group, but {where} has none", "give rivals=0")


def _check_names(composition: Composition, row: str) -> None:
    """Raise `VerifierError` for an unknown verifier. row: the first that names it; empty: the user did."""
    for term in composition.terms:
        try:
            target(term.ref)
        except UnknownName as error:
            raise VerifierError(error.message + (f" (row {row})" if row else ""), error.hint) from None
