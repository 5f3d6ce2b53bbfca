"""The lazy registry of built-ins and plugins; both use Python entry points."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from rlcli.errors import RlcliError, UnknownName
from rlcli.support.importing import import_problem

T = TypeVar("T")


def near(name: str, known: Iterable[str]) -> str:
    """A «did you mean» for an unknown name, or the list of known names.

    >>> near("gsm9k", ["gsm8k", "math"]), near("GSM8K", ["gsm8k", "math"])
    ('did you mean gsm8k?', 'did you mean gsm8k?')
    """
    known = sorted(known)
    folded = {candidate.casefold(): candidate for candidate in known}
    wanted = name.casefold()
    close = [wanted] if wanted in folded else difflib.get_close_matches(wanted, folded, n=3, cutoff=0.6)
    close = [folded[candidate] for candidate in close]
    if close:
        return f"did you mean {', '.join(close)}?"
    return f"known: {', '.join(known) or 'none'}"


def load_entry(entry: EntryPoint, title: str) -> Any:
    """The object of an entry point. Raises `RlcliError` naming `title` if its import raises, hangs or exits.

    The import is tested in another process first, unless the package is this one, or is imported already.
    """
    ours = entry.dist is not None and entry.dist.name == "rlcli"
    if not ours and entry.module not in sys.modules and (problem := import_problem(entry.module)):
        raise RlcliError(f"{title} {problem}", "see what it does when it is imported, or remove that package")
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # a module may exit when it is imported
        raise RlcliError(f"{title} does not load: {error!r}", "reinstall or remove that package") from error


class Registry(Generic[T]):
    """Names of one kind, each loaded when it is first used.

    `kind` is the word in error messages; `group` is the entry-point group of the packages. A package adds an entry in
    its pyproject.toml:

        [project.entry-points."rlcli.verifiers"]
        chess = "my_package.chess:verify"

    >>> colours: Registry[str] = Registry("colour", "example.colours")
    >>> colours.add("upper", "string:ascii_uppercase")
    >>> colours.get("upper")[:3]
    'ABC'
    >>> colours.get("uper")
    Traceback (most recent call last):
    rlcli.errors.UnknownName: no colour is called 'uper'; did you mean upper?
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._added: dict[str, T | str] = {}

    def add(self, name: str, target: T | str) -> None:
        """Register `target`, an object or a lazy `"module:attribute"`. A name can be taken once."""
        if name in self._added or name in self._published:
            raise RlcliError(f"the {self.kind} '{name}' is registered twice", "give one of them another name")
        self._added[name] = target

    def names(self) -> list[str]:
        """All names, sorted. Loads nothing."""
        return sorted({*self._added, *self._published})

    def origin(self, name: str) -> str:
        """The distribution that published `name` (`rlcli 0.1.0`), or `local`."""
        entry = self._published.get(name)
        return f"{entry.dist.name} {entry.dist.version}" if entry and entry.dist else "local"

    def target(self, name: str) -> str:
        """Location of the definition of `name`, as `"module:attribute"`. Loads nothing. Raises `UnknownName`."""
        if name in self._added:
            added = self._added[name]
            return added if isinstance(added, str) else f"{added.__module__}:{getattr(added, '__qualname__', name)}"
        entry = self._entry(name)
        return f"{entry.module}:{entry.attr}"

    def get(self, name: str) -> T:
        """The entry called `name`, loaded if it was not yet.

        Raises `UnknownName` with the near names, or `RlcliError` when a plugin fails to import: raises, hangs or exits.
        """
        target = self._added.get(name)
        if target is not None and not isinstance(target, str):
            return target
        entry = self._entry(name) if target is None else EntryPoint(name, target, self.group)
        return cast(T, load_entry(entry, f"the {self.kind} '{name}' ({self.origin(name)}, {entry.value})"))

    @cached_property
    def _published(self) -> dict[str, EntryPoint]:
        entries: dict[str, EntryPoint] = {}
        for entry in entry_points(group=self.group):
            other = entries.get(entry.name)
            # An editable install can list the same entry twice; two different targets are a clash.
            if other is not None and other.value != entry.value:
                raise RlcliError(
                    f"the {self.kind} '{entry.name}' is published twice: {other.value} and {entry.value}",
                    "uninstall one of the two packages",
                )
            entries[entry.name] = entry
        return entries

    def _entry(self, name: str) -> EntryPoint:
        if name not in self._published:
            raise UnknownName(f"no {self.kind} is called '{name}'", near(name, self.names()))
        return self._published[name]
