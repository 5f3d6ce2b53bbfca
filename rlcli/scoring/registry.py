"""The verifiers that there are, built in and from plugins, by name; and where the reference of an expression leads."""

from __future__ import annotations

from rlcli.errors import ConfigError
from rlcli.registry import Registry
from rlcli.scoring.spec import AUTO, Composition, is_file, parse
from rlcli.types import Verifier

VERIFIERS: Registry[Verifier] = Registry("verifier", "rlcli.verifiers")


def target(ref: str) -> str:
    """Where `ref` leads: `module:attribute`, or `/path/to/file.py:attribute`. Loads nothing.

    Raises `UnknownName` with the near names, and `ConfigError` for `auto`, whose row is not here, and for a file alone.
    """
    if ref == AUTO:
        raise ConfigError("the verifier 'auto' stands for what a row names, and there is no row", "name a verifier")
    if ref.endswith(".py"):
        raise ConfigError(
            f"the verifier '{ref}' is a file, and which function of it is not said", f"write {ref}:FUNCTION"
        )
    return ref if ":" in ref else VERIFIERS.target(ref)


def of_row(expression: Composition, style: str) -> Composition:
    """The verifiers of a row that names `style` (a name or an expression), in the place of `auto`.

    Raises `ConfigError` where the style cannot be read, names code that is not installed (a file of data must not say
    what is run) or names what the expression names too.
    """
    own = parse(style)
    for term in own.terms:
        if ":" in term.ref:
            kind = "a file" if is_file(term.ref) else "a module"
            raise ConfigError(
                f"it names code in {kind} as its verifier: {term.ref}",
                f"rows may name installed verifiers only; where you trust it, give --verifier '{term.ref}'",
            )
        if term.ref == AUTO:
            raise ConfigError("it names auto as its verifier", "name a verifier")
    return expression.with_rows_own(own)
