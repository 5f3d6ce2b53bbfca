"""The registry of verifiers, built in and from plugins, by name; and resolution of the references of an expression."""

from __future__ import annotations

import shlex

from rlcli.errors import ConfigError, UnknownName
from rlcli.registry import Registry
from rlcli.rewards.expression import AUTO, Composition, Term, is_file, parse
from rlcli.rewards.row_options import row_options
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


MOST_STYLE_CHARS = 1000
"""Maximum length of the expression in a row."""


def of_row(expression: Composition, style: str) -> Composition:
    """The verifiers of a row that names `style` (a name or an expression), in place of `auto`.

    Raises `ConfigError` if the style cannot be parsed, chooses what a row must not choose (`check_row_may_name`) or
    names a verifier that the expression names too.
    """
    if len(style) > MOST_STYLE_CHARS:
        raise ConfigError(f"it has {len(style):,} characters", f"rows may name verifiers in {MOST_STYLE_CHARS}")
    row_verifiers = parse(style)
    for term in row_verifiers.terms:
        check_row_may_name(term)
    return expression.with_rows_own(row_verifiers)


def check_row_may_name(term: Term) -> None:
    """Raise `ConfigError` for a verifier, or an option of one, that a row must not choose.

    Data files are untrusted. They may name installed verifiers that allow it (`row_options`), not code in a file or a
    module, nor addresses, keys, models, paths, memory and time. An unknown name passes here.
    """
    hint = f"rows may not choose that; if you trust it, give --verifier {shlex.quote(term.verifier)}"
    if ":" in term.ref or is_file(term.ref):
        kind = "a file" if is_file(term.ref) else "a module"
        raise ConfigError(f"it names code in {kind} as its verifier: {term.ref}", hint)
    if term.ref == AUTO:
        raise ConfigError("it names auto as its verifier", "name a verifier")
    try:
        allowed = row_options(target(term.ref))
    except UnknownName:  # reported with the names that are known, where verifiers are loaded
        return
    if allowed is None:
        raise ConfigError(f"it names the verifier {term.ref}", hint)
    if refused := next((name for name in term.options if name not in allowed), ""):
        may = f"rows may set {', '.join(sorted(allowed))}" if allowed else "rows may set none"
        raise ConfigError(f"it sets the option {refused} of the verifier {term.ref} ({may})", hint)
