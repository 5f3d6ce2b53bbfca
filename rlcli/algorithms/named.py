"""How a module of algorithms offers its functions by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rlcli.errors import UnknownName
from rlcli.registry import near

F = TypeVar("F", bound=Callable[..., Any])


class Named(Generic[F]):
    """The functions of one kind, each registered where it is defined.

    >>> greeting: Named[Callable[[str], str]] = Named("greeting")
    >>> @greeting("hello")
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

    def __call__(self, name: str) -> Callable[[F], F]:
        """Decorator: register the function as `name`, which can be taken once."""

        def register(function: F) -> F:
            assert name not in self._functions, f"the {self.kind} '{name}' is registered twice"
            self._functions[name] = function
            return function

        return register

    def get(self, name: str) -> F:
        """The function called `name`. Raises `UnknownName` with the near names."""
        if name not in self._functions:
            raise UnknownName(f"no {self.kind} is called '{name}'", near(name, self._functions))
        return self._functions[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._functions)
