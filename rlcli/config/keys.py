"""The catalog of configuration keys, from the schema: for `rlcli recipes explain` and error messages."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from pydantic import BaseModel

from rlcli.config.alternatives import UNSET
from rlcli.config.schema import RunConfig
from rlcli.errors import ConfigError
from rlcli.registry import Registry

TABLE = "a table of numbers"


FOREIGN_KEYS: Registry[Callable[[str], list[str]]] = Registry("translation of keys", "rlcli.foreign_keys")
"""Functions from the name of another framework's key to the keys of ours that set the same, from entry points."""


class RenamedKey(FutureWarning):
    """A key was given under its old name."""


RENAMED = {
    "algorithm.mismatch_alarm": "algorithm.mismatch_warning",
    "cluster.replicate": "parallel.replicate",
}
"""Old key → new key. An old one works for one release, with a warning."""
MOVED_INTO_LIST = {"train.beta1": ("train.betas", 0), "train.beta2": ("train.betas", 1)}
"""Old key → the list that has its value now, and its index there; for one release, too."""


@dataclass(frozen=True)
class Key:
    """One key of the configuration.

    >>> keys()["rollout.temperature"].rule
    'a number > 0 and ≤ 10'
    """

    name: str
    """Dotted name."""
    rule: str
    """Accepted values, in words."""
    default: Any
    """Default, as JSON."""
    description: str
    """Description from the schema."""
    kind: str
    """JSON type: string, integer, number, boolean, array, object for a table, or any for a value in a table that is not
    restricted to numbers."""
    optional: bool
    """True if it may be `unset`."""
    accepts_list: bool = False
    """True if it accepts a list besides a single value."""


def sections() -> dict[str, type[BaseModel]]:
    """Every section by its name."""
    return {
        field.alias or name: cast(type[BaseModel], field.annotation) for name, field in RunConfig.model_fields.items()
    }


@cache
def keys() -> dict[str, Key]:
    """Every key by its dotted name, in the order of the schema."""
    by_name: dict[str, Key] = {}
    for section, kind in sections().items():
        properties = kind.model_json_schema()["properties"]
        for name, schema in properties.items():
            by_name[f"{section}.{name}"] = _key(f"{section}.{name}", schema)
    return by_name


def current_name(name: str, origin: str) -> str:
    """The current name of a key; warns if `name`, of `origin`, is an old one."""
    if name not in RENAMED and name not in MOVED_INTO_LIST:
        return name
    now = RENAMED[name] if name in RENAMED else f"a part of {MOVED_INTO_LIST[name][0]}"
    text = (
        f"the key {name} ({origin}) is now {'called ' * (name in RENAMED)}{now}; the next release refuses the old name"
    )
    warnings.warn(text, RenamedKey, stacklevel=2)
    return RENAMED.get(name, name)


def set_value(values: dict[str, Any], name: str, value: Any) -> str:
    """Set a key's value in `values`; an old key that is now an item of a list sets that item. Returns the name of the
    changed key."""
    if name not in MOVED_INTO_LIST:
        values[name] = value
        return name
    list_name, index = MOVED_INTO_LIST[name]
    parts = list(values.get(list_name, keys()[list_name].default))
    parts[index : index + 1] = [value]
    values[list_name] = parts
    return list_name


def find_key(name: str) -> Key | None:
    """The key called `name`. Every member of a table (`algorithm.options`, `data.chat_template_kwargs`) is a key.

    >>> find_key("algorithm.options.beta").rule
    'a number'
    """
    table = keys().get(name.rpartition(".")[0])
    if table is not None and table.kind == "object":
        numbers = table.rule == TABLE
        rule, kind = ("a number", "number") if numbers else ("text, a number, true or false", "any")
        return Key(name, rule, None, table.description, kind, False)
    if name in MOVED_INTO_LIST:
        list_key = keys()[MOVED_INTO_LIST[name][0]]
        return Key(name, "a number", None, list_key.description, "number", False)
    return keys().get(name)


def matching_keys(prefix: str = "") -> list[Key]:
    """The keys called `prefix` or in the section `prefix`; all keys if it is empty.

    Raises `ConfigError` with similar names if there is none.
    """
    member = find_key(prefix)
    if member is not None and prefix not in keys():
        return [member]
    matching = [key for key in keys().values() if prefix in ("", key.name, key.name.partition(".")[0])]
    if not matching:
        raise unknown_key(prefix)
    return matching


def unknown_key(name: str, origin: str = "") -> ConfigError:
    """The error for a key that is not in the schema, with similar keys."""
    where = f" ({origin})" if origin else ""
    if name in sections():
        return ConfigError(
            f"'{name}' is a section{where}", f"its keys: {', '.join(k.name for k in matching_keys(name))}"
        )
    if name in keys():
        kind = "number" if keys()[name].rule == TABLE else "value"
        return ConfigError(f"'{name}' is a table{where}", f"set one of its {kind}s: {name}.NAME={kind.upper()}")
    leaf = name.rpartition(".")[2]
    leaves = {known.partition(".")[2] for known in keys()}
    close_leaves = difflib.get_close_matches(leaf, leaves, n=2, cutoff=0.75)
    close = counterparts(name) if leaf not in leaves or name.count(".") != 1 else []
    close = close or difflib.get_close_matches(name, keys(), n=1, cutoff=0.85)
    close = close or [known for known in keys() if known.partition(".")[2] in close_leaves]
    close = close or difflib.get_close_matches(name, keys(), n=3, cutoff=0.6)
    hint = f"did you mean {', '.join(close)}?" if close else "list them with: rlcli recipes explain"
    return ConfigError(f"no key is called '{name}'{where}", hint)


def counterparts(name: str) -> list[str]:
    """Keys that set what the key `name` of another framework sets."""
    return [key for framework in FOREIGN_KEYS.names() for key in FOREIGN_KEYS.get(framework)(name)]


def _key(name: str, schema: dict[str, Any]) -> Key:
    variants = schema.get("anyOf", [schema])
    optional = {"type": "null"} in variants
    concrete = next(variant for variant in variants if variant.get("type") != "null")
    rule = (schema.get("rule") or _rule(concrete)) + (f", or {UNSET}" if optional else "")
    accepts_list = concrete["type"] != "array" and any(variant.get("type") == "array" for variant in variants)
    return Key(name, rule, schema.get("default"), schema["description"], concrete["type"], optional, accepts_list)


def _rule(schema: dict[str, Any]) -> str:
    if "rule" in schema:  # the schema's own terms would not be readable
        return str(schema["rule"])
    if schema["type"] == "object":
        return TABLE
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    if schema["type"] == "array":
        return "a list, each " + _rule(schema["items"])
    noun = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {_plain(schema[bound])}" for bound, sign in signs.items() if bound in schema]
    return " ".join([noun[schema["type"]], " and ".join(bounds)]).strip()


def _plain(bound: float) -> str:
    """
    >>> _plain(4294967296.0), _plain(0.5)
    ('4294967296', '0.5')
    """
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"
