"""The catalog of recipes: TOML files in packages that the entry-point group `rlcli.recipes` names, or anywhere.

A package publishes the recipes that lie beside its `__init__.py` with

    [project.entry-points."rlcli.recipes"]
    mine = "my_recipes"

A recipe holds a `[recipe]` header and the sections of the configuration; with `base = "grpo"` in the header it changes
only what it names.
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

from rlcli.errors import ConfigError, RlcliError, UnknownName
from rlcli.registry import Registry, near

PACKAGES: Registry[ModuleType] = Registry("recipe package", "rlcli.recipes")


@dataclass(frozen=True)
class Header:
    """What a recipe says of itself. A packaged recipe fills in every field; `base` and `task` where it has one."""

    name: str
    summary: str = ""
    """One line: what it trains and how."""
    paper: str = ""
    when: str = ""
    """When to choose it rather than another."""
    hardware: str = ""
    expect: str = ""
    """What a run should show, with the source of each figure."""
    reproduced: str = ""
    """Where this very recipe was run, and what came out; `no` until it was."""
    base: str = ""
    """Name, or path from this file, of the recipe that it starts from."""
    task: str = ""
    """The model and the data that it is for; empty for an algorithm, which goes with any."""


@dataclass(frozen=True)
class Recipe:
    """A recipe with its bases folded in. values, origins: by dotted key, the value and the recipe that gave it."""

    header: Header
    values: Mapping[str, Any]
    origins: Mapping[str, str]
    source: str
    text: str = field(repr=False)


def names() -> list[str]:
    """The packaged recipes, sorted."""
    return sorted(_catalog())


def broken() -> list[RlcliError]:
    """Why recipe packages that are installed do not load."""
    errors = []
    for entry in PACKAGES.names():
        try:
            PACKAGES.get(entry)
        except RlcliError as error:
            errors.append(error)
    return errors


def load(name: str, _chain: tuple[str, ...] = ()) -> Recipe:
    """The recipe called `name`, or in the file `name` when that is a path that ends in .toml.

    Raises `UnknownName` with the near names; `ConfigError` for a file that is missing, is not TOML or has an unknown
    header, and for bases that go in a circle.
    """
    file, source = _find(name)
    if source in _chain:
        circle = " → ".join((*_chain[_chain.index(source) :], source))
        raise ConfigError(f"recipe bases go in a circle: {circle}", "remove one `base`")
    try:
        text = file.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOML's and UTF-8's, too many digits or brackets
        raise ConfigError(f"{source} is not TOML: {error}", "mend that line") from error
    except OSError as error:
        asked = f"{_chain[-1]}: its base " if _chain else ""
        raise ConfigError(
            f"{asked}{source} cannot be read: {error.strerror}", "give a recipe's name or file"
        ) from error
    header = _header(table.pop("recipe", {}), default_name=Path(source).stem, source=source)
    values, origins = dict[str, Any](), dict[str, str]()
    if header.base:
        try:
            base = load(_beside(header.base, file), (*_chain, source))
        except UnknownName as error:
            raise UnknownName(f"{source}: {error.message}", error.mend) from error
        values, origins = dict(base.values), dict(base.origins)
    own = flatten(table)
    values.update(own)
    origins.update(dict.fromkeys(own, header.name))
    return Recipe(header, values, origins, source, text)


def copy_text(name: str, new_name: str) -> str:
    """The recipe `name` as a file of its own, with its comments, that resolves to the same from any folder.

    It is the file as it was written, but for its header: it is called `new_name`, and a base that was a path from the
    file is a whole path. Raises what `load` raises, and `ConfigError` for a header that is not a [recipe] section of
    one field a line.
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
            raise ConfigError(f"{name!r} is no path: it holds a NUL character", "give the path of a .toml file")
        path = Path(name).expanduser()
        return path, os.path.realpath(path)
    catalog = _catalog()
    if name not in catalog:
        hidden = [f"and {error}" for error in broken()]  # which might have held it
        mends = [near(name, catalog), "the name of a file ends in .toml", *hidden]
        raise UnknownName(f"no recipe is called '{name}'", "; ".join(mends))
    return catalog[name]


def _beside(base: str, file: Path | Traversable) -> str:
    if base.endswith(".toml") and isinstance(file, Path):
        return str(file.parent / Path(base).expanduser())
    return base


def _with_field(text: str, name: str, value: str, recipe: Recipe) -> str:
    """`text` with another value of a field of its header."""
    before = tomllib.loads(text)
    if name not in before.get("recipe", {}):
        return text  # A recipe without a name bears its file's.
    other_fields = r"(?:(?![ \t]*\[)[^\n]*\n)*?"
    text_value = """("[^"\n]*"|'[^'\n]*')"""
    line = re.compile(
        rf"(?P<head>^[ \t]*\[recipe\][^\n]*\n{other_fields}[ \t]*{name}[ \t]*=[ \t]*){text_value}", re.MULTILINE
    )
    changed = line.sub(lambda found: found["head"] + json.dumps(value, ensure_ascii=False), text, count=1)
    before["recipe"][name] = value
    if tomllib.loads(changed) != before:
        raise ConfigError(
            f"{recipe.source}: cannot change {name} in its header", "write a [recipe] section, a field a line"
        )
    return changed


def _catalog() -> dict[str, tuple[Traversable, str]]:
    found: dict[str, tuple[Traversable, str]] = {}
    for entry in PACKAGES.names():
        try:
            package = PACKAGES.get(entry)
        except RlcliError:
            continue  # One broken package must not hide the others; `broken` tells.
        for file in files(package).iterdir():
            name, dot, ending = file.name.rpartition(".")
            if (dot, ending) != (".", "toml"):
                continue
            if name in found:
                raise ConfigError(
                    f"the recipe '{name}' is published twice: by {found[name][1]} and {package.__name__}",
                    "uninstall one of the two packages",
                )
            found[name] = (file, f"{package.__name__}/{file.name}")
    return found


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
