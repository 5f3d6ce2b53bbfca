"""The function and the module of a verifier, imported in this process: for what is read of them, not to verify."""

from __future__ import annotations

from typing import Any

from rlcli.errors import VerifierError
from rlcli.rewards.verifier_registry import VERIFIERS, target
from rlcli.support.importing import import_problem


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
    from rlcli.rewards.verifier_loading import find

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
