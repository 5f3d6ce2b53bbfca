"""The registry of verifiers, built in and from plugins, by name; and resolution of the references of an expression."""

from __future__ import annotations

from rlcli.errors import ConfigError
from rlcli.registry import Registry
from rlcli.scoring.expression import AUTO, Composition, is_file, parse
from rlcli.types import Verifier

VERIFIERS: Registry[Verifier] = Registry("verifier", "rlcli.verifiers")


def target(ref: str) -> str:
    """The target of `ref`: `module:attribute`, or `/path/to/file.py:attribute`. Loads nothing.

    Raises `UnknownName` with similar names, and `ConfigError` for `auto`, which needs a row, and for a file without a
    function.
    """
    if ref == AUTO:
        raise ConfigError("the verifier 'auto' needs a row that names its verifier", "name a verifier")
    if ref.endswith(".py"):
        raise ConfigError(f"the verifier '{ref}' is a file without the name of a function", f"write {ref}:FUNCTION")
    return ref if ":" in ref else VERIFIERS.target(ref)


def of_row(expression: Composition, style: str) -> Composition:
    """The verifiers of a row that names `style` (a name or an expression), in place of `auto`.

    Raises `ConfigError` if the style cannot be parsed, names code that is not installed (a data file must not choose
    the code to run) or names a verifier that the expression names too.
    """
    own = parse(style)
    for term in own.terms:
        if ":" in term.ref:
            kind = "a file" if is_file(term.ref) else "a module"
            raise ConfigError(
                f"it names code in {kind} as its verifier: {term.ref}",
                f"rows may name installed verifiers only; if you trust it, give --verifier '{term.ref}'",
            )
        if term.ref == AUTO:
            raise ConfigError("it names auto as its verifier", "name a verifier")
    return expression.with_rows_own(own)
