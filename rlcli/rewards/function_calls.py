"""Call functions of any convention with the arguments they declare, one by one or in batches, sync or async."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import SupportsFloat, TypeVar, cast

from rlcli.rewards.combine import Verified
from rlcli.types import Outcome, Verdict, VerifyRequest

Parameters = Mapping[str, inspect.Parameter]
Options = Mapping[str, object]
"""Options of a verifier by name: TOML values, converted to the annotations of its parameters."""
T = TypeVar("T")

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that can be passed by name."""


class BadResult(TypeError):
    """A result that the convention of `function` does not allow. Its text names the result and the expected type."""

    def __init__(self, function: Callable[..., object], text: str) -> None:
        super().__init__(text)
        self.function = function


@dataclass(frozen=True)
class Loaded:
    """A verifier of any convention, adapted to requests and verdicts."""

    verify: Callable[[Sequence[VerifyRequest]], Sequence[Verified]]
    """Returns a result for each request; raises if the whole batch failed."""
    prefers_batches: bool
    """True if batches of requests are faster than single ones."""
    groups: bool = False
    """True if each call needs all responses to a prompt, one after another."""


@dataclass(frozen=True)
class Convention:
    """A calling convention for functions."""

    text: str
    """Its name and the parameters that it fills, for messages."""
    matches: Callable[[Parameters], bool]
    """True if a function with these parameters is of this kind."""
    inputs: Callable[[Parameters], set[str]]
    """The names of the parameters that a caller fills; the others are options."""
    adapt: Callable[[Callable[..., object], Options], Loaded]
    """Makes a verifier of the function and the options that it gets in every call."""


@dataclass(frozen=True)
class Conventions:
    """The conventions of other frameworks; an entry point of `rlcli.reward_conventions` names them."""

    functions: tuple[Convention, ...]
    """In the order in which they are tried, before the native ones."""
    rubric: Callable[[object], Loaded]
    """Adapts an object with reward functions."""


def missing_parameters(parameters: Parameters, available: Iterable[str]) -> list[str]:
    """The required parameters that are not available."""
    provided, empty = set(available), inspect.Parameter.empty
    return [
        name
        for name, parameter in parameters.items()
        if parameter.kind in NAMED and parameter.default is empty and name not in provided
    ]


def argument_filter(function: Callable[..., object]) -> Callable[[Mapping[str, object]], dict[str, object]]:
    """Select the available arguments that the function declares: all of them if it takes `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict
    return lambda arguments: {name: value for name, value in arguments.items() if name in parameters}


def result_per_request(
    function: Callable[..., object], results: object, requests: Sequence[VerifyRequest], kind: str
) -> list[object]:
    """The results as a list. kind: a name for one result. Raises `BadResult` unless there is one for each request."""
    expected = f"a list of {len(requests)} {kind}{'' if len(requests) == 1 else 's'}"
    if results is None or isinstance(results, str | bytes | Mapping) or not isinstance(results, Iterable):
        raise BadResult(function, f"returned {shown(results)}, expected {expected}")
    listed = list(results)
    if len(listed) != len(requests):
        raise BadResult(function, f"returned a list of {len(listed)}, expected {expected}")
    return listed


def shown(result: object) -> str:
    """The text of a result, at most 200 characters."""
    try:
        return f"{result!r:.200}"
    except Exception:  # of its `__repr__`
        return f"an object of type {type(result).__name__}"


def verdict_of(function: Callable[..., object], score: object, expected: str = "a number") -> Verdict:
    """The verdict with a number as its score: OK above 0, else WRONG. Raises `BadResult` for any other result of
    `function`."""
    value = number_of(function, score, expected)
    return Verdict(value, Outcome.OK if value > 0 else Outcome.WRONG)


def number_of(function: Callable[..., object], value: object, expected: str) -> float:
    """A result as a finite number. expected: its description, for the `BadResult` raised otherwise."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(cast("SupportsFloat", value))
    except (TypeError, ValueError, RuntimeError, OverflowError):  # torch raises a RuntimeError for several values
        raise BadResult(function, f"returned {shown(value)}, expected {expected}") from None
    if not math.isfinite(number):
        raise BadResult(function, f"returned {number}, expected {expected.replace('a number', 'a finite number', 1)}")
    return number


def code_of(function: Callable[..., object]) -> CodeType | None:
    """The code of a function or of a callable object; None if it is not written in Python."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    with_code = function if hasattr(function, "__code__") else getattr(type(function), "__call__", None)  # noqa: B004 - the method itself
    code = getattr(with_code, "__code__", None)
    return code if isinstance(code, CodeType) else None


def is_async(function: Callable[..., object]) -> bool:
    """True if a function, or the `__call__` of an object, is a coroutine function."""
    call = getattr(function, "__call__", None)  # noqa: B004 - for objects whose `__call__` is async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def awaited(result: object) -> object:
    """The result, awaited if it is awaitable."""
    return await result if inspect.isawaitable(result) else result


def run_concurrently(verify: Callable[[VerifyRequest], Awaitable[Verified]], *, prefers_batches: bool) -> Loaded:
    """A verifier that runs an async function on all requests of a batch concurrently."""

    async def attempt(request: VerifyRequest) -> Verified:
        try:
            return await verify(request)
        except BaseException as error:  # any exception is a crash
            return error

    async def all_of(requests: Sequence[VerifyRequest]) -> list[Verified]:
        return await asyncio.gather(*map(attempt, requests))

    return Loaded(lambda requests: run(all_of(requests)), prefers_batches)


_runner: asyncio.Runner | None = None


def run(awaitable: Awaitable[T]) -> T:
    """Await on this process's only event loop: clients that a verifier keeps are bound to their loop."""
    global _runner

    async def caught() -> tuple[T] | BaseException:
        try:
            return (await awaitable,)
        except BaseException as error:  # otherwise a SystemExit would stop the loop and its other tasks
            return error

    _runner = _runner or asyncio.Runner()
    result = _runner.run(caught())
    if isinstance(result, BaseException):
        raise result
    return result[0]
