"""Shell completion: names of recipes, keys, runs, verifiers, environments and datasets.

A shell calls these at each press of the tab key, so they import little and never fail: on an error there are no
candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path

Names = Callable[[str], list[str]]
REGISTRIES = {
    "rollout.engine": "rlcli.engines",
    "verifier.name": "rlcli.verifiers",
    "environment.name": "rlcli.environments",
}
"""Key → entry points that its values name."""


def completer(find: Callable[[str], Iterable[str]]) -> Names:
    """A function for `typer.Option(autocompletion=…)` from one that returns candidates for the text typed so far."""

    @wraps(find)
    def complete(incomplete: str) -> list[str]:
        try:
            return [name for name in find(incomplete) if name.startswith(incomplete)]
        except Exception:  # a broken plugin or folder: an error would appear in the middle of the command line
            return []

    return complete


@completer
def recipes(incomplete: str) -> Iterable[str]:
    from rlcli.config.recipes import names

    return [*names(), *_files(incomplete, ".toml")]


@completer
def keys(incomplete: str) -> Iterable[str]:
    """Keys with their `=`; after it, or for a single matching key, the values in its rule or a registry."""
    from rlcli.config.keys import find_key
    from rlcli.config.keys import keys as known

    name, equals, _ = incomplete.partition("=")
    if not equals:
        matching = [key for key, described in known().items() if described.kind != "object" and key.startswith(name)]
        if len(matching) != 1 or not (values := _values_of(matching[0], known()[matching[0]].rule)):
            return [f"{key}=" for key in matching]
        return [f"{matching[0]}={value}" for value in values]
    key = find_key(name)
    return [f"{name}={value}" for value in _values_of(name, key.rule if key else "")]


@completer
def key_names(incomplete: str) -> Iterable[str]:
    from rlcli.config.keys import keys as known

    return known()


@completer
def runs(incomplete: str) -> Iterable[str]:
    """Names below runs/, or folders of runs at the typed path."""
    from rlcli.runs.folder import LOCK

    path = Path(incomplete)
    if "/" not in incomplete:
        return sorted(lock.parent.name for lock in Path("runs").glob(f"*/{LOCK}"))
    parent = path if incomplete.endswith("/") else path.parent
    return sorted(str(lock.parent) for lock in parent.glob(f"*/{LOCK}"))


@completer
def models(incomplete: str) -> Iterable[str]:
    """Runs, and folders with a model."""
    path = Path(incomplete)
    parent = path if incomplete.endswith("/") else path.parent
    return [*runs(incomplete), *sorted(str(config.parent) for config in parent.glob("*/config.json"))]


@completer
def verifiers(incomplete: str) -> Iterable[str]:
    """Names of verifiers; in an expression, for its last term."""
    from rlcli.rewards.verifier_registry import VERIFIERS

    prefix = incomplete[: max(incomplete.rfind(mark) for mark in " +*(") + 1]
    return [prefix + name for name in VERIFIERS.names()]


@completer
def environments(incomplete: str) -> Iterable[str]:
    from rlcli.environments.environment import ENVIRONMENTS

    return ENVIRONMENTS.names()


@completer
def converters(incomplete: str) -> Iterable[str]:
    from rlcli.registry import Registry

    # As in `rlcli.prep.pipeline`, whose import loads more.
    registry: Registry[object] = Registry("dataset", "rlcli.data_prep")
    return registry.names()


@completer
def datasets(incomplete: str) -> Iterable[str]:
    """Folders with a train.parquet or test.parquet, and parquet files."""
    path = Path(incomplete)
    parent = path if incomplete.endswith("/") or not incomplete else path.parent
    prepared = {str(file.parent) for split in ("train", "test") for file in parent.glob(f"*/{split}.parquet")}
    if incomplete in ("", "d", "da", "dat", "data"):
        prepared |= {str(file.parent) for file in Path("data").glob("*/train.parquet")}
    folders = [
        f"{folder}/" for folder in parent.glob("*/") if str(folder) not in prepared and not folder.name.startswith(".")
    ]
    return sorted([*prepared, *folders, *_files(incomplete, ".parquet")])


def _files(incomplete: str, suffix: str) -> list[str]:
    path = Path(incomplete)
    parent = path if incomplete.endswith("/") or not incomplete else path.parent
    return sorted(str(file) for file in parent.glob(f"*{suffix}"))


def _values_of(key: str, rule: str) -> list[str]:
    from rlcli.registry import Registry

    if key in REGISTRIES:
        registry: Registry[object] = Registry("value", REGISTRIES[key])
        return registry.names()
    return _values(rule)


def _values(rule: str) -> list[str]:
    """
    >>> _values("true or false"), _values("one of bnpo, drgrpo"), _values("a number > 0")
    (['true', 'false'], ['bnpo', 'drgrpo'], [])
    """
    if rule.startswith("true or false"):
        return ["true", "false"]
    return [value.strip().strip('"') for value in rule.removeprefix("one of ").split(",")] if "one of " in rule else []
