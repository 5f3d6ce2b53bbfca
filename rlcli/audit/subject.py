"""The subject of an audit: an expression, the kind of its answers and the form of a right answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlcli.errors import VerifierError
from rlcli.importing import import_problem
from rlcli.scoring.expression import Composition
from rlcli.scoring.registry import VERIFIERS, target
from rlcli.types import VerifyRequest

KINDS = ("number", "latex", "choice", "text", "code", "countdown", "shape", "length")

Gold = Callable[[VerifyRequest], str]


@dataclass(frozen=True)
class Subject:
    """A verifier, or a sum of several, as the audit uses it.

    expression: as the pool takes it. kind: the ANSWER_KIND of its first term, empty if it declares none. gold: the
    first term's; None if it has none. has_options: whether the first term is given options, which its gold does not
    receive. composed: whether scores are added, so that 1 is not the full score.
    """

    expression: str
    kind: str
    gold: Gold | None
    has_options: bool
    composed: bool

    @property
    def full_score(self) -> bool:
        """Whether a right answer scores 1: neither a sum nor a penalty does that."""
        return not self.composed and self.kind != "length"


def subject(composition: Composition) -> Subject:
    """Import the first verifier of `composition`. Raises `VerifierError` if that fails or its kind is unknown."""
    first = composition.terms[0]
    module = module_of(first.ref)
    kind, gold = getattr(module, "ANSWER_KIND", ""), getattr(module, "gold", None)
    if kind == "judged":
        raise VerifierError(f"'{composition}' begins with a judge", f"audit the judge alone: {first.verifier}")
    if kind and kind not in KINDS:
        raise VerifierError(
            f"the verifier '{first.ref}': its module's ANSWER_KIND is {kind!r}", f"make it one of {', '.join(KINDS)}"
        )
    gold = gold if callable(gold) else None
    return Subject(str(composition), str(kind), gold, bool(first.options), composition.is_sum)


def module_of(ref: str) -> Any:
    """The module of a reference, imported here. Raises `RlcliError` with the reason if it cannot be imported."""
    return _found(ref)[0]


def function_of(ref: str) -> Any:
    """The object of a reference. Raises `RlcliError` with the reason if it does not load or is not a function."""
    function = _found(ref)[1]
    # A rubric is an object of functions.
    if not callable(function) and not hasattr(function, "funcs"):
        raise VerifierError(
            f"the verifier '{ref}' ({target(ref)}) is of type {type(function).__name__}, not a function",
            "fix or reinstall its package",
        )
    return function


def _found(ref: str) -> tuple[Any, Any]:
    from rlcli.scoring.load import find

    place = target(ref)
    if ":" not in ref:
        VERIFIERS.get(ref)  # which names the package in its error
    elif problem := import_problem(place.rpartition(":")[0]):
        raise VerifierError(f"the verifier '{ref}' {problem}", "check what its file does at import")
    try:
        return find(place)
    except (Exception, SystemExit) as error:  # a module may call sys.exit at import
        raise VerifierError(
            f"the verifier '{ref}' ({place}) does not load: {type(error).__name__}: {error}", "fix it or its package"
        ) from error
