"""Verifiers and options that a row of a dataset may choose.

Data files come from others, so a row must not choose an address, a key, a model, a path, or limits of memory and time.
A verifier's module lists the options that its rows may set:

    ROW_OPTIONS = ("mode",)

Without the list a row may name the verifier and set none of its options. `ROW_OPTIONS = None`: no row may name it.
The list is read from the module's source, so that no code of a plugin runs before the user or a row has named it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec

from rlcli.errors import ConfigError

NAME = "ROW_OPTIONS"


@cache
def row_options(target: str) -> frozenset[str] | None:
    """The options that a row may set of the verifier at `target` (`module:attribute`); None: no row may name it.

    Raises `ConfigError` if the module's `ROW_OPTIONS` is not written as a tuple of names or None.
    """
    module = target.partition(":")[0]
    value = _constant(_source(module), NAME, ())
    if value is None:
        return None
    if not isinstance(value, tuple | list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{NAME} of {module} is not a tuple of names", f'write {NAME} = ("mode",), or None')
    return frozenset(value)


def _constant(source: str, name: str, default: object) -> object:
    """The literal that the module with this source assigns to `name` last; Ellipsis for another expression."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):  # its import reports it
        return default
    value = default
    for statement in statements:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = _literal(statement.value)
    return value


def _literal(node: ast.expr | None) -> object:
    try:
        return ast.literal_eval(node) if node is not None else ...
    except ValueError:
        return ...


def _source(module: str) -> str:
    """The source of an installed module, without importing it or its packages; empty if there is none."""
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    names = module.split(".")
    for count in range(1, len(names) + 1):
        spec = _spec(".".join(names[:count]), path)
        if spec is None:
            return ""
        path = spec.submodule_search_locations
    loader = spec.loader if spec else None
    try:
        return (loader.get_source(module) or "") if loader is not None and hasattr(loader, "get_source") else ""
    except (ImportError, SyntaxError):  # without a source, or not in UTF-8
        return ""


def _spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    # `importlib.util.find_spec` would import the packages that contain the module.
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        except KeyError:  # a part of a namespace package that is not imported
            spec = None
        if spec is not None:
            return spec
    return None
