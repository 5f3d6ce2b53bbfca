"""What shells complete: names of recipes, keys, runs, verifiers, environments and datasets.

A shell calls these at each press of the tab key, so they import little and never fail: what they raise is swallowed,
and nothing is offered.
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
    """A function for `typer.Option(autocompletion=…)` from one that gives candidates for what was typed so far."""

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
    """Keys with their `=`; after it, and of a single key, the values that its rule or a registry lists."""
    from rlcli.config.keys import find
    from rlcli.config.keys import keys as known

    name, equals, _ = incomplete.partition("=")
    if not equals:
        begun = [key for key, one in known().items() if one.kind != "object" and key.startswith(name)]
        if len(begun) != 1 or not (values := _values_of(begun[0], known()[begun[0]].rule)):
            return [f"{key}=" for key in begun]
        return [f"{begun[0]}={value}" for value in values]
    key = find(name)
    return [f"{name}={value}" for value in _values_of(name, key.rule if key else "")]


@completer
def key_names(incomplete: str) -> Iterable[str]:
    from rlcli.config.keys import keys as known

    return known()


@completer
def runs(incomplete: str) -> Iterable[str]:
    """Names below runs/, or folders of runs at the path that was begun."""
    from rlcli.runs.folder import LOCK

    path = Path(incomplete)
    if "/" not in incomplete:
        return sorted(lock.parent.name for lock in Path("runs").glob(f"*/{LOCK}"))
    above = path if incomplete.endswith("/") else path.parent
    return sorted(str(lock.parent) for lock in above.glob(f"*/{LOCK}"))


@completer
def models(incomplete: str) -> Iterable[str]:
    """Runs, and folders that hold a model."""
    path = Path(incomplete)
    above = path if incomplete.endswith("/") else path.parent
    return [*runs(incomplete), *sorted(str(config.parent) for config in above.glob("*/config.json"))]


@completer
def verifiers(incomplete: str) -> Iterable[str]:
    """Names; in an expression, of its last term."""
    from rlcli.rewards.verifier_registry import VERIFIERS

    before = incomplete[: max(incomplete.rfind(mark) for mark in " +*(") + 1]
    return [before + name for name in VERIFIERS.names()]


@completer
def environments(incomplete: str) -> Iterable[str]:
    from rlcli.environments.environment import ENVIRONMENTS

    return ENVIRONMENTS.names()


@completer
def converters(incomplete: str) -> Iterable[str]:
    from rlcli.registry import Registry

    # As in `rlcli.prep.pipeline`, whose import loads more.
    found: Registry[object] = Registry("dataset", "rlcli.data_prep")
    return found.names()


@completer
def datasets(incomplete: str) -> Iterable[str]:
    """Folders with a train.parquet or test.parquet, and parquet files."""
    path = Path(incomplete)
    above = path if incomplete.endswith("/") or not incomplete else path.parent
    found = {str(file.parent) for split in ("train", "test") for file in above.glob(f"*/{split}.parquet")}
    if incomplete in ("", "d", "da", "dat", "data"):
        found |= {str(file.parent) for file in Path("data").glob("*/train.parquet")}
    folders = [f"{one}/" for one in above.glob("*/") if str(one) not in found and not one.name.startswith(".")]
    return sorted([*found, *folders, *_files(incomplete, ".parquet")])


def _files(incomplete: str, suffix: str) -> list[str]:
    path = Path(incomplete)
    above = path if incomplete.endswith("/") or not incomplete else path.parent
    return sorted(str(file) for file in above.glob(f"*{suffix}"))


def _values_of(key: str, rule: str) -> list[str]:
    from rlcli.registry import Registry

    if key in REGISTRIES:
        found: Registry[object] = Registry("value", REGISTRIES[key])
        return found.names()
    return _values(rule)


def _values(rule: str) -> list[str]:
    """
    >>> _values("true or false"), _values("one of bnpo, drgrpo"), _values("a number > 0")
    (['true', 'false'], ['bnpo', 'drgrpo'], [])
    """
    if rule.startswith("true or false"):
        return ["true", "false"]
    return [value.strip().strip('"') for value in rule.removeprefix("one of ").split(",")] if "one of " in rule else []
