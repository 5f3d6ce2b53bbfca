"""Import the function and the module of a verifier into this process, for documentation and checks, not to verify."""

from __future__ import annotations

from types import ModuleType

from rlcli.errors import VerifierError
from rlcli.rewards.verifier_registry import VERIFIERS, target
from rlcli.support.importing import import_problem


def module_of(ref: str) -> ModuleType:
    """The module of a reference, imported here. Raises `RlcliError` with the reason if it cannot be imported."""
    return _import(ref)[0]


def function_of(ref: str) -> object:
    """The object of a reference. Raises `RlcliError` with the reason if it does not load or is not a function."""
    function = _import(ref)[1]
    # A rubric is an object of functions.
    if not callable(function) and not hasattr(function, "funcs"):
        raise VerifierError(
            f"the verifier '{ref}' ({target(ref)}) is of type {type(function).__name__}, not a function",
            "fix or reinstall its package",
        )
    return function


def _import(ref: str) -> tuple[ModuleType, object]:
    from rlcli.rewards.verifier_loading import find

    location = target(ref)
    if ":" not in ref:
        VERIFIERS.get(ref)  # which names the package in its error
    elif problem := import_problem(location.rpartition(":")[0]):
        raise VerifierError(f"the verifier '{ref}' {problem}", "check what its file does at import")
    try:
        return find(location)
    except (Exception, SystemExit) as error:  # a module may call sys.exit at import
        raise VerifierError(
            f"the verifier '{ref}' ({location}) does not load: {type(error).__name__}: {error}", "fix it or its package"
        ) from error
