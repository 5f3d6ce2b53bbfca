"""Expands `~` and environment variables in the paths of a configuration, as a shell does in its arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from rlcli.errors import ConfigError

PATHS = (
    "model.path",
    "model.chat_template",
    "data.path",
    "evaluation.data",
    "critic.path",
    "teacher.path",
    "algorithm.code",
    "environment.name",
    "environment.python",
    "verifier.name",
    "rollout.servers_folder",
)
"""Keys whose texts are paths, or may be. (A verifier's expression: its files, see `rlcli.rewards.expression`.)"""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


def with_paths_expanded(values: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, Any]:
    """The values of a configuration, by dotted key, with `~` and variables expanded in its paths. Raises `ConfigError`
    for a variable that is not set."""
    return {key: _expanded_in(key, value, origins) if key in PATHS else value for key, value in values.items()}


def _expanded_in(key: str, value: Any, origins: Mapping[str, str]) -> Any:
    if isinstance(value, list | tuple):
        return [_expanded_in(key, entry, origins) for entry in value]
    if isinstance(value, Mapping):
        return {name: _expanded_in(key, entry, origins) if name == "path" else entry for name, entry in value.items()}
    return expanded(value, f"{key} = {value} ({origins.get(key, 'default')})") if isinstance(value, str) else value


def expanded(text: str, subject: str) -> str:
    """A path with `~` and `$NAME` or `${NAME}` expanded; a URL, and one that exists as it is written, stays as it is.
    subject: its name in an error message. Raises `ConfigError` for a variable that is not set.

    >>> expanded("http://host/~me/$x", "teacher.path"), expanded("~", "data.path") == os.path.expanduser("~")
    ('http://host/~me/$x', True)
    """
    if "://" in text or "\0" in text or (("$" in text or text.startswith("~")) and os.path.lexists(text)):
        return text

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise ConfigError(
                f"{subject}: the variable {name} is not set", f"set it (export {name}=…), or write the path"
            )
        return os.environ[name]

    return os.path.expanduser(_VARIABLE.sub(value_of, text))
