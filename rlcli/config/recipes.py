"""The catalog of recipes: TOML files in packages of the entry-point group `rlcli.recipes`, or at any path.

A package publishes the recipes beside its `__init__.py` with

    [project.entry-points."rlcli.recipes"]
    mine = "my_recipes"

A recipe has a `[recipe]` header and configuration sections; with `base = "grpo"` in the header it changes only the keys
that it names.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlcli.config.alternatives import replaced_by
from rlcli.errors import ConfigError, RlcliError, UnknownName
from rlcli.registry import Registry, near
from rlcli.support.reading import parse_toml, read_text

PACKAGES: Registry[ModuleType] = Registry("recipe package", "rlcli.recipes")


@dataclass(frozen=True)
class Header:
    """The [recipe] section. A packaged recipe fills in every field; `base` and `task` only if it has one."""

    name: str
    """Name of the recipe, equal to the file's."""
    summary: str = ""
    """One line: what it trains and how."""
    paper: str = ""
    """Paper of the algorithm."""
    when: str = ""
    """When to choose it."""
    hardware: str = ""
    """Hardware that it needs."""
    expect: str = ""
    """Results that a run should show, with the source of each figure."""
    reproduced: str = ""
    """Place and result of the run that showed it; `no` until then."""
    base: str = ""
    """Name, or path relative to this file, of the recipe that it starts from."""
    task: str = ""
    """The model and data that it is for; empty for an algorithm, which works with any."""


@dataclass(frozen=True)
class Recipe:
    """A recipe with its bases merged in."""

    header: Header
    """The [recipe] section."""
    values: Mapping[str, Any]
    """Dotted key → value."""
    origins: Mapping[str, str]
    """Dotted key → the recipe that set it."""
    source: str
    """Origin of the recipe, for messages."""
    text: str = field(repr=False)
    """The text of its file."""
    in_files: Mapping[str, str] = field(default_factory=dict)
    """Dotted key → the file that set it, of values that come from a file and not from an installed package."""


def names() -> list[str]:
    """The packaged recipes, sorted."""
    return sorted(_catalog()[0])


def broken() -> list[RlcliError]:
    """The errors of installed recipe packages that do not load."""
    return _catalog()[1]


def load(name: str, _chain: tuple[str, ...] = ()) -> Recipe:
    """The recipe called `name`, or in the file `name` if that ends in .toml.

    Raises `UnknownName` with similar names; `ConfigError` for a file that is missing, is not TOML or has an unknown
    header field, and for circular bases.
    """
    file, source = _find(name)
    if source in _chain:
        circle = " → ".join((*_chain[_chain.index(source) :], source))
        raise ConfigError(f"recipe bases are circular: {circle}", "remove one `base`")
    try:
        # A packaged recipe may lie in an archive.
        text = read_text(file, links=True) if isinstance(file, Path) else file.read_text(encoding="utf-8")
        table = parse_toml(text)
    except ValueError as error:  # TOML's and UTF-8's, too many digits or brackets
        raise ConfigError(f"{source} is not TOML: {error}", "fix that line") from error
    except OSError as error:
        requested = f"{_chain[-1]}: its base " if _chain else ""
        raise ConfigError(
            f"{requested}{source} cannot be read: {error.strerror}", "give a recipe's name or file"
        ) from error
    header = _header(table.pop("recipe", {}), default_name=Path(source).stem, source=source)
    values, origins, in_files = dict[str, Any](), dict[str, str](), dict[str, str]()
    if header.base:
        try:
            base = load(_beside(header.base, file), (*_chain, source))
        except UnknownName as error:
            raise UnknownName(f"{source}: {error.message}", error.hint) from error
        values, origins, in_files = dict(base.values), dict(base.origins), dict(base.in_files)
    own_values = flatten(table)
    for key in replaced_by(own_values):
        values.pop(key, None)
        origins.pop(key, None)
        in_files.pop(key, None)
    values.update(own_values)
    origins.update(dict.fromkeys(own_values, header.name))
    if name.endswith(".toml"):
        in_files.update(dict.fromkeys(own_values, source))
    return Recipe(header, values, origins, source, text, in_files)


def copy_text(name: str, new_name: str) -> str:
    """The text of a copy of the recipe `name`, with its comments, that resolves to the same from any folder.

    Only the header changes: the name is `new_name`, and a relative base path becomes absolute. Raises what `load`
    raises, and `ConfigError` for a header that is not a [recipe] section with one field per line.
    """
    recipe, (file, _) = load(name), _find(name)
    text = recipe.text
    if recipe.header.name != new_name:
        text = _with_field(text, "name", new_name, recipe)
    if recipe.header.base.endswith(".toml"):
        text = _with_field(text, "base", str(Path(_beside(recipe.header.base, file)).resolve()), recipe)
    return text


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys.

    >>> flatten({"train": {"lr": 1e-6, "steps": 5}})
    {'train.lr': 1e-06, 'train.steps': 5}
    """
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _find(name: str) -> tuple[Path | Traversable, str]:
    if name.endswith(".toml"):
        if "\0" in name:
            raise ConfigError(f"{name!r} is not a path: it holds a NUL character", "give the path of a .toml file")
        path = Path(name).expanduser()
        return path, os.path.realpath(path)
    catalog, errors = _catalog()
    if name not in catalog:
        hidden = [f"and {error}" for error in errors]  # the recipe may be in one of these packages
        fixes = [near(name, catalog), "a file name must end in .toml", *hidden]
        raise UnknownName(f"no recipe is called '{name}'", "; ".join(fixes))
    return catalog[name]


def _beside(base: str, file: Path | Traversable) -> str:
    if base.endswith(".toml") and isinstance(file, Path):
        return str(file.parent / Path(base).expanduser())
    return base


def _with_field(text: str, name: str, value: str, recipe: Recipe) -> str:
    """`text` with a new value of one header field."""
    head = tomllib.loads(text)
    if name not in head.get("recipe", {}):
        return text  # A recipe without a name is named after its file.
    other_fields = r"(?:(?![ \t]*\[)[^\n]*\n)*?"
    text_value = """("[^"\n]*"|'[^'\n]*')"""
    line = re.compile(
        rf"(?P<head>^[ \t]*\[recipe\][^\n]*\n{other_fields}[ \t]*{name}[ \t]*=[ \t]*){text_value}", re.MULTILINE
    )
    changed = line.sub(lambda match: match["head"] + json.dumps(value, ensure_ascii=False), text, count=1)
    head["recipe"][name] = value
    if tomllib.loads(changed) != head:
        raise ConfigError(
            f"{recipe.source}: cannot change {name} in its header", "write a [recipe] section, one field per line"
        )
    return changed


def _catalog() -> tuple[dict[str, tuple[Traversable, str]], list[RlcliError]]:
    """Each packaged recipe's file and source, and the errors of packages that do not load: one broken package must not
    hide the others."""
    recipes, errors = dict[str, tuple[Traversable, str]](), list[RlcliError]()
    for entry in PACKAGES.names():
        try:
            package = PACKAGES.get(entry)
        except RlcliError as error:
            errors.append(error)
            continue
        for file in files(package).iterdir():
            name, dot, ending = file.name.rpartition(".")
            if (dot, ending) != (".", "toml"):
                continue
            if name in recipes:
                raise ConfigError(
                    f"the recipe '{name}' is published twice: by {recipes[name][1]} and {package.__name__}",
                    "uninstall one of the two packages",
                )
            recipes[name] = (file, f"{package.__name__}/{file.name}")
    return recipes, errors


def _header(table: Any, default_name: str, source: str) -> Header:
    known = [field.name for field in fields(Header)]
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source}: recipe = {table!r} is not a table", "write a [recipe] section")
    for name, value in table.items():
        if name not in known:
            raise ConfigError(f"{source}: [recipe] has no field '{name}'", near(name, known))
        if not isinstance(value, str):
            raise ConfigError(f"{source}: [recipe] {name} = {value!r} is not text", "put it in quotes")
    return Header(**{"name": default_name, **table})
