"""How functions of any convention are called: with what they declare, one by one or many at once, awaited or not."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcli.scoring.combine import Verified
from rlcli.types import VerifyRequest

Parameters = Mapping[str, inspect.Parameter]

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that can be given by name."""


@dataclass(frozen=True)
class Loaded:
    """A verifier of any convention. verify: what it makes of each request; raises where the whole batch failed. many:
    whether it gains from being given many requests at once."""

    verify: Callable[[Sequence[VerifyRequest]], Sequence[Verified]]
    many: bool


def lacking_of(parameters: Parameters, available: Iterable[str]) -> list[str]:
    """The parameters that must be given and are not available."""
    there, empty = set(available), inspect.Parameter.empty
    return [
        name for name, one in parameters.items() if one.kind in NAMED and one.default is empty and name not in there
    ]


def wanted_by(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Picks, of what there is, what the function declares: all of it where it takes `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return dict
    return lambda there: {name: value for name, value in there.items() if name in parameters}


def one_each(results: Any, requests: Sequence[VerifyRequest]) -> list[Any]:
    given = list(results)
    if len(given) != len(requests):
        raise ValueError(f"it returned {len(given)} verdicts for {len(requests)} requests")
    return given


def is_async(function: Any) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - of an object, which may itself be no coroutine function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def gathered(one: Callable[[VerifyRequest], Awaitable[Verified]], *, many: bool) -> Loaded:
    async def attempt(request: VerifyRequest) -> Verified:
        try:
            return await one(request)
        except BaseException as error:  # whatever it raises, it crashed
            return error

    async def all_of(requests: Sequence[VerifyRequest]) -> list[Verified]:
        return await asyncio.gather(*map(attempt, requests))

    return Loaded(lambda requests: run(all_of(requests)), many)


_runner: asyncio.Runner | None = None


def run(awaitable: Awaitable[Any]) -> Any:
    """What it comes to, on this process's one event loop: clients that a verifier keeps belong to their loop."""
    global _runner

    async def caught() -> tuple[Any, BaseException | None]:
        try:
            return await awaitable, None
        except BaseException as error:  # a SystemExit would else stop the loop amid others' work
            return None, error

    _runner = _runner or asyncio.Runner()
    result, raised = _runner.run(caught())
    if raised is not None:
        raise raised
    return result
