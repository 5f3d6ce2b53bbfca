"""Registers functions by name, and reads which inputs and options a function declares.

A function's ordinary parameters are inputs: the caller passes those that it declares, by name. Its keyword-only
parameters are options, which the configuration may set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from rlcli.errors import RlcliError, UnknownName
from rlcli.registry import load_entry, near

GROUP = "rlcli.algorithms"
"""Entry points of this group name modules that register functions when they are imported."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rules:
    """What a function demands of the rest of the configuration. Declared where it is registered, for plugins too.

    needs_group: it compares the samples of a prompt, so there must be two or more. makes_pairs: a selection that
    returns pairs, the better one first: a micro-batch must hold two samples. only_in_reward: a KL estimate whose
    gradient is useless as a term of the loss. ignores_rewards: an advantage that suits given responses too, which have
    no reward.
    """

    needs_group: bool = False
    makes_pairs: bool = False
    only_in_reward: bool = False
    ignores_rewards: bool = False


class Named(Generic[F]):
    """The functions of one kind, each registered where it is defined.

    >>> greeting: Named[Callable[[str], str]] = Named("greeting")
    >>> @greeting.register("hello")
    ... def hello(name: str) -> str:
    ...     return f"Hello, {name}!"
    >>> greeting.get("hello")("Ada")
    'Hello, Ada!'
    >>> greeting.get("helo")
    Traceback (most recent call last):
    rlcli.errors.UnknownName: no greeting is called 'helo'; did you mean hello?
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, F] = {}
        self._rules: dict[str, Rules] = {}

    def register(self, name: str, **rules: bool) -> Callable[[F], F]:
        """Decorator: register the function as `name`, which must be unique. rules: the fields of `Rules`.

        The same function again, from a file that is read a second time, replaces itself.
        """

        def register(function: F) -> F:
            other = self._functions.get(name)
            if other is not None and _source(other) != _source(function):
                raise RlcliError(
                    f"the {self.kind} '{name}' is registered twice: in {_source(other)[0]} and {_source(function)[0]}",
                    "give one of them another name",
                )
            self._functions[name], self._rules[name] = function, Rules(**rules)
            return function

        return register

    def get(self, name: str) -> F:
        """The function called `name`. Raises `UnknownName` with similar names."""
        if name not in self._functions:
            load_plugins()
        if name not in self._functions:
            raise UnknownName(f"no {self.kind} is called '{name}'", near(name, self._functions))
        return self._functions[name]

    def rules(self, name: str) -> Rules:
        """The rules of the function called `name`. Raises `UnknownName`."""
        self.get(name)
        return self._rules.get(name, Rules())

    def names(self) -> list[str]:
        """All names, sorted, including those of installed packages."""
        load_plugins()
        return sorted(self._functions)


@cache
def load_plugins() -> None:
    """Import the modules that installed packages publish, once. Raises `RlcliError` for one that fails to import."""
    for entry in entry_points(group=GROUP):
        load_entry(entry, f"the package of algorithms '{entry.name}' ({entry.value})")


def inputs_of(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the inputs that `function` asks for.

    >>> def loss(log_probs, advantages, *, beta=0.1): ...
    >>> sorted(inputs_of(loss))
    ['advantages', 'log_probs']
    """
    return frozenset(
        name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind is not _OPTION
    )


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The options of `function` with their defaults; `inspect.Parameter.empty` for one that must be given.

    >>> def loss(log_probs, advantages, *, beta=0.1): ...
    >>> options_of(loss)
    {'beta': 0.1}
    """
    parameters = inspect.signature(function).parameters
    return {name: parameter.default for name, parameter in parameters.items() if parameter.kind is _OPTION}


def call(function: Callable[..., Any], inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call `function` with those of `inputs` and `options` that it declares.

    >>> call(lambda rewards, *, scale=1: rewards * scale, {"rewards": 3, "groups": 0}, {"scale": 2, "beta": 9})
    6
    """
    chosen = {name: inputs[name] for name in inputs_of(function) if name in inputs}
    return function(**chosen, **{name: options[name] for name in options_of(function) if name in options})


def _source(function: Callable[..., Any]) -> tuple[str, str]:
    return inspect.getfile(function), function.__qualname__


_OPTION = inspect.Parameter.KEYWORD_ONLY
