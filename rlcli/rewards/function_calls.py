"""Call functions of any convention with the arguments they declare, one by one or in batches, sync or async."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

from rlcli.rewards.combine import Verified
from rlcli.types import Outcome, Verdict, VerifyRequest

Parameters = Mapping[str, inspect.Parameter]

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that can be passed by name."""


class BadResult(TypeError):
    """A result that the convention of `function` does not allow. Its text says what was returned and expected."""

    def __init__(self, function: Any, text: str) -> None:
        super().__init__(text)
        self.function = function


@dataclass(frozen=True)
class Loaded:
    """A verifier of any convention. verify: returns its result for each request; raises if the whole batch failed.
    many: whether it gains from getting many requests at once. groups: whether a call has to hold all responses to a
    prompt, one after another."""

    verify: Callable[[Sequence[VerifyRequest]], Sequence[Verified]]
    many: bool
    groups: bool = False


@dataclass(frozen=True)
class Convention:
    """How functions of one kind are called."""

    text: str
    """Its name and the parameters that it fills, for messages."""
    matches: Callable[[Parameters], bool]
    """Whether a function with these parameters is of this kind."""
    inputs: Callable[[Parameters], set[str]]
    """The names of the parameters that a caller fills; the others are options."""
    adapt: Callable[[Callable[..., Any], Mapping[str, Any]], Loaded]
    """Takes the function and the options that it gets in every call."""


@dataclass(frozen=True)
class Conventions:
    """What an entry point of `rlcli.reward_conventions` names: the conventions of other frameworks."""

    functions: tuple[Convention, ...]
    """In the order in which they are tried, before the native ones."""
    rubric: Callable[[Any], Loaded]
    """Adapts an object with reward functions."""


def lacking_of(parameters: Parameters, available: Iterable[str]) -> list[str]:
    """The required parameters that are not available."""
    there, empty = set(available), inspect.Parameter.empty
    return [
        name for name, one in parameters.items() if one.kind in NAMED and one.default is empty and name not in there
    ]


def wanted_by(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Selects the available arguments that the function declares: all of them if it takes `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return dict
    return lambda there: {name: value for name, value in there.items() if name in parameters}


def one_each(function: Any, results: Any, requests: Sequence[VerifyRequest], what: str) -> list[Any]:
    """The results as a list. Raises `BadResult` if they are not a list of as many as requests. what: one result."""
    expected = f"a list of {len(requests)} {what}{'' if len(requests) == 1 else 's'}"
    if results is None or isinstance(results, str | bytes | Mapping) or not isinstance(results, Iterable):
        raise BadResult(function, f"returned {shown(results)}, expected {expected}")
    listed = list(results)
    if len(listed) != len(requests):
        raise BadResult(function, f"returned a list of {len(listed)}, expected {expected}")
    return listed


def shown(result: Any) -> str:
    """The text of a result, at most 200 characters."""
    try:
        return f"{result!r:.200}"
    except Exception:  # of its `__repr__`
        return f"an object of type {type(result).__name__}"


def verdict_of(function: Callable[..., Any], score: Any, expected: str = "a number") -> Verdict:
    """The verdict with a number as its score: right if it is above 0. Raises `BadResult` for anything else that
    `function` has returned."""
    value = number_of(function, score, expected)
    return Verdict(value, Outcome.OK if value > 0 else Outcome.WRONG)


def number_of(function: Callable[..., Any], value: Any, expected: str) -> float:
    """A result as a finite number. Raises `BadResult`, which says that `expected` was expected."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # torch raises a RuntimeError for several values
        raise BadResult(function, f"returned {shown(value)}, expected {expected}") from None
    if not math.isfinite(number):
        raise BadResult(function, f"returned {number}, expected {expected.replace('a number', 'a finite number', 1)}")
    return number


def code_of(function: Any) -> CodeType | None:
    """The code of a function, or of an object that is called like one; None if it is not Python's."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):
        function = getattr(type(function), "__call__", None)  # noqa: B004 - the method itself
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


def is_async(function: Any) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - for objects whose `__call__` is async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def gathered(one: Callable[[VerifyRequest], Awaitable[Verified]], *, many: bool) -> Loaded:
    async def attempt(request: VerifyRequest) -> Verified:
        try:
            return await one(request)
        except BaseException as error:  # any exception is a crash
            return error

    async def all_of(requests: Sequence[VerifyRequest]) -> list[Verified]:
        return await asyncio.gather(*map(attempt, requests))

    return Loaded(lambda requests: run(all_of(requests)), many)


_runner: asyncio.Runner | None = None


def run(awaitable: Awaitable[Any]) -> Any:
    """Its result, awaited on this process's only event loop: clients that a verifier keeps are bound to their loop."""
    global _runner

    async def caught() -> tuple[Any, BaseException | None]:
        try:
            return await awaitable, None
        except BaseException as error:  # otherwise a SystemExit would stop the loop and its other tasks
            return None, error

    _runner = _runner or asyncio.Runner()
    result, raised = _runner.run(caught())
    if raised is not None:
        raise raised
    return result
