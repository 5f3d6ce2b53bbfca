"""Registers the functions of an algorithm by name, each with what it declares: the columns that it reads, its rules.

A function's ordinary parameters are the same for all of a kind, such as one `LossInputs`. Its keyword-only parameters
are options, which the configuration may set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Generic, Literal, ParamSpec, TypeVar

from rlcli.algorithms.inputs import Inputs
from rlcli.errors import RlcliError, UnknownName
from rlcli.registry import load_entry, near

GROUP = "rlcli.algorithms"
"""Entry points of this group name modules that register functions when they are imported."""

Level = Literal["response", "turn", "token"]
"""Unit that an advantage function gives a number to."""

R = TypeVar("R")
V = TypeVar("V")
R_co = TypeVar("R_co", covariant=True)
P = ParamSpec("P")


@dataclass(frozen=True)
class Rules:
    """Demands of a function of the rest of the configuration. Declared where it is registered, for plugins too."""

    level: Level = "response"
    """Unit that an advantage has a number for. `turn` and `token` ones read other columns than `response` ones."""
    needs_group: bool = False
    """It compares the samples of a prompt, so there must be two or more."""
    makes_pairs: bool = False
    """A selection that returns pairs, the better one first: a micro-batch must hold two samples."""
    only_in_reward: bool = False
    """A KL estimate whose gradient is useless as a term of the loss."""
    ignores_rewards: bool = False
    """An advantage that suits given responses too, which have no reward."""
    rejects: bool = False
    """A correction that returns 0 or 1, and whose tokens with 0 leave the denominators too. It is called once, before
    the first update of a step."""


@dataclass(frozen=True)
class Part(Generic[R_co]):
    """A registered function, with what it declares and the options that the configuration gives it."""

    title: str
    """Kind and name, for errors: the policy loss 'ppo'."""
    function: Callable[..., R_co]
    needs: frozenset[str]
    """The columns that it reads."""
    rules: Rules = Rules()
    """Properties that it was registered with."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options that it is called with."""

    def __call__(self, *arguments: object) -> R_co:
        """Call the function with its options. Records are restricted to the columns that it declares."""
        restricted = [item.only(self.needs, self.title) if isinstance(item, Inputs) else item for item in arguments]
        return self.function(*restricted, **self.options)


class FunctionRegistry(Generic[R]):
    """The functions of one kind, each registered where it is defined.

    kind: the words for it in errors. arguments: the names of its ordinary parameters. columns: the columns that
    functions with these rules may declare.

    >>> greeting: FunctionRegistry[str] = FunctionRegistry("greeting", ("name",))
    >>> @greeting.register("hello")
    ... def hello(name: str, *, mark: str = "!") -> str:
    ...     return f"Hello, {name}{mark}"
    >>> greeting.get("hello")("Ada")
    'Hello, Ada!'
    >>> greeting.part("hello", {"mark": "?", "size": 3})("Ada")
    'Hello, Ada?'
    >>> greeting.get("helo")
    Traceback (most recent call last):
    rlcli.errors.UnknownName: no greeting is called 'helo'; did you mean hello?
    """

    def __init__(
        self,
        kind: str,
        arguments: tuple[str, ...],
        columns: Callable[[Rules], frozenset[str]] = lambda rules: frozenset(),
    ) -> None:
        self.kind, self.arguments, self.columns = kind, arguments, columns
        self._parts: dict[str, Part[R]] = {}

    def register(
        self,
        name: str,
        *,
        needs: Sequence[str] = (),
        level: Level = "response",
        needs_group: bool = False,
        makes_pairs: bool = False,
        only_in_reward: bool = False,
        ignores_rewards: bool = False,
        rejects: bool = False,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorator: register the function as `name`, which must be unique. needs: the columns that it reads; the
        others are the fields of `Rules`. Raises `RlcliError` for a column that there is not.

        The same function again, from a file that is read a second time, replaces itself.
        """
        rules = Rules(level, needs_group, makes_pairs, only_in_reward, ignores_rewards, rejects)
        title, known = f"the {self.kind} '{name}'", self.columns(rules)
        for column in needs:
            if column not in known:
                raise RlcliError(f"{title} needs '{column}', which is not available", near(column, known))

        def register(function: Callable[P, R]) -> Callable[P, R]:
            other = self._parts.get(name)
            if other is not None and _source(other.function) != _source(function):
                first_file, second_file = _source(other.function)[0], _source(function)[0]
                raise RlcliError(
                    f"{title} is registered twice: in {first_file} and {second_file}", "give one of them another name"
                )
            self._check_arguments(title, function)
            self._parts[name] = Part(title, function, frozenset(needs), rules)
            return function

        return register

    def get(self, name: str) -> Callable[..., R]:
        """The function called `name`. Raises `UnknownName` with similar names."""
        return self.part(name).function

    def part(self, name: str, options: Mapping[str, object] | None = None) -> Part[R]:
        """The function called `name` with what it declares, and with those of `options` that it takes. Raises
        `UnknownName` with similar names."""
        if name not in self._parts:
            load_plugins()
        if name not in self._parts:
            raise UnknownName(f"no {self.kind} is called '{name}'", near(name, self._parts))
        part = self._parts[name]
        return Part(part.title, part.function, part.needs, part.rules, chosen_options(part.function, options or {}))

    def rules(self, name: str) -> Rules:
        """The rules of the function called `name`. Raises `UnknownName`."""
        return self.part(name).rules

    def names(self) -> list[str]:
        """All names, sorted, including those of installed packages."""
        load_plugins()
        return sorted(self._parts)

    def _check_arguments(self, title: str, function: Callable[..., object]) -> None:
        """Refuse a function that cannot be called with the arguments of this kind."""
        try:
            inspect.signature(function).bind(*self.arguments, **dict.fromkeys(options_of(function)))
        except TypeError as error:
            ordinary = [name for name in inspect.signature(function).parameters if name not in options_of(function)]
            raise RlcliError(
                f"{title} takes ({', '.join(ordinary)}), and is called with ({', '.join(self.arguments)})",
                "declare the columns with needs=(…) and read them as attributes"
                if self.arguments[-1] == "inputs"
                else "take these, in this order",
            ) from error


@cache
def load_plugins() -> None:
    """Import the modules that installed packages publish, once. Raises `RlcliError` for one that fails to import."""
    for entry in entry_points(group=GROUP):
        load_entry(entry, f"the package of algorithms '{entry.name}' ({entry.value})")


def options_of(function: Callable[..., object]) -> dict[str, object]:
    """The options of `function` with their defaults; `inspect.Parameter.empty` for one that must be given.

    >>> def loss(inputs, *, beta=0.1): ...
    >>> options_of(loss)
    {'beta': 0.1}
    """
    parameters = inspect.signature(function).parameters
    return {name: parameter.default for name, parameter in parameters.items() if parameter.kind is _OPTION}


def chosen_options(function: Callable[..., object], options: Mapping[str, V]) -> dict[str, V]:
    """Options among `options` that `function` takes.

    >>> chosen_options(lambda rewards, *, scale=1: rewards * scale, {"scale": 2, "beta": 9})
    {'scale': 2}
    """
    return {name: options[name] for name in options_of(function) if name in options}


def _source(function: Callable[..., object]) -> tuple[str, str]:
    return inspect.getfile(function), function.__qualname__


_OPTION = inspect.Parameter.KEYWORD_ONLY
