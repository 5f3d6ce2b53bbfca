"""Keeps commands that only inspect a recipe from running code, or contacting addresses, that its file names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence

from rlcli.config.load import FLAGS, to_toml
from rlcli.config.recipes import load
from rlcli.errors import ConfigError, RlcliError
from rlcli.rewards.expression import parse
from rlcli.rewards.row_options import row_options
from rlcli.rewards.verifier_registry import target

_NAME = re.compile(r"[\w-]*")
_WORDS = re.compile(r"[\w\s-]*")
_SANDBOXES = ("auto", "bwrap", "landlock")
_OPTIONS = "environment.options."
ALGORITHM, VERIFIER = "algorithm.code", "verifier.name"


def refuse_code(
    recipe: str,
    flags: Mapping[str, object],
    sets: Sequence[str],
    command: str,
    only: str | None = None,
    *,
    leaves_verifier: bool = False,
) -> str:
    """Raise `ConfigError` if a recipe's file names code, or an address that would be asked, which the command line does
    not name itself. leaves_verifier: such code in `verifier.name` is no error; the command does not run it. Returns
    that expression, or an empty text.

    A recipe may come from anyone, and `--dry-run` and `rlcli plan` are how one looks at it. Recipes of installed
    packages may name what they like. recipe: a name or a file. command: what the user called, for the message. only:
    the only key that this command would follow.
    """
    on_command_line = {key for key, value in flags.items() if value is not None}
    on_command_line |= {text.partition("=")[0].strip() for text in sets}
    loaded = load(recipe)
    unverified = ""
    if leaves_verifier and VERIFIER in loaded.in_files and VERIFIER not in on_command_line:
        unverified = _code_alone(loaded.values[VERIFIER])
        on_command_line |= {VERIFIER} if unverified else set()
    code = {
        key: loaded.values[key]
        for key in loaded.in_files
        if key not in on_command_line and only in (None, key) and _is_code(key, loaded.values[key])
    }
    if not code:
        return unverified
    key, value = next(iter(code.items()))
    others = f" (and {len(code) - 1} more)" if len(code) > 1 else ""
    words = " ".join(_command_line(key, value) for key, value in code.items())
    raise ConfigError(
        f"{loaded.in_files[key]}: {key} = {to_toml(value)}{others}: {command} neither runs nor asks what only a "
        "recipe's file names",
        f"if you trust it, name it on the command line too: {words}",
    )


def _is_code(key: str, value: object) -> bool:
    """True if this value of a key names code, a model or an address that a check before a run executes, loads or
    contacts."""
    if key.startswith(_OPTIONS):  # adapters import what their options name
        return isinstance(value, str) and not _WORDS.fullmatch(value)
    check = _CHECKS.get(key)
    return check is not None and check(value)


def _of_verifier(value: object) -> bool:
    return isinstance(value, str) and any(_only_users_may_name(ref) for ref in _refs(value))


def _code_alone(expression: object) -> str:
    """The expression if all that only the user may name in it is code in files and modules, which can be left out of a
    check: no judge, whose address would be asked, and no model. Else an empty text."""
    restricted = [ref for ref in _refs(expression) if _only_users_may_name(ref)] if isinstance(expression, str) else []
    return str(expression) if restricted and all(":" in ref for ref in restricted) else ""


def _refs(expression: str) -> list[str]:
    try:
        return [term.ref for term in parse(expression).terms]
    except ConfigError:  # reported where the configuration is checked
        return []


def _only_users_may_name(ref: str) -> bool:
    """True if only the user may name this verifier, not a row."""
    try:
        return ":" in ref or (ref != "auto" and row_options(target(ref)) is None)
    except RlcliError:  # unknown
        return False


def _is_url(value: object) -> bool:
    models = value if isinstance(value, list | tuple) else [value]
    return any("://" in str(model.get("path") if isinstance(model, Mapping) else model) for model in models)


def _command_line(key: str, value: object) -> str:
    flag, text = FLAGS.get(key), value if isinstance(value, str) else to_toml(value)
    return f"{flag} {shlex.quote(text)}" if flag else f"--set {shlex.quote(f'{key}={text}')}"


_CHECKS: Mapping[str, Callable[[object], bool]] = {
    VERIFIER: _of_verifier,
    "verifier.sandbox": lambda value: value not in _SANDBOXES,
    "environment.name": lambda value: not _NAME.fullmatch(str(value)),
    "environment.python": bool,
    ALGORITHM: bool,
    "teacher.path": _is_url,
}
"""Key → test whether its value is code or an address that checks before a run use."""
