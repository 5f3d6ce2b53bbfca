"""Adapters for functions of other frameworks; the names of a function's parameters select its convention.

| convention     | recognised by a parameter                                   | gives                                 |
|----------------|-------------------------------------------------------------|---------------------------------------|
| ours           | the first, and no other positional one without a default    | a `Verdict` or a number; None: not    |
|                |                                                             | this row                              |
| ours, in batch | the same, named `requests`                                  | a list of these                       |
| verl           | `solution_str`                                              | a number, or a dict with `score`      |
| TRL            | `completions`, `completion_ids` or `prompts`                | a list of numbers; None: not this row |
| PrimeIntellect | `completion`, `answer`, `prompt`, `state`, `info` or `task` | a number                              |

Each may be `async`. Parameters beyond those of the convention are options (for TRL those that have a default). A number
is a score, OK above 0 and WRONG otherwise. An object with `funcs` and `weights` is a weighted sum of
rubric functions.

TRL and Prime Intellect pass a completion as text or as chat messages, depending on the dataset. Ours are texts; a
function that fails on text, or whose annotation names messages, gets `[{"role": "assistant", …}]`.
"""

from __future__ import annotations

import dis
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from numbers import Real
from types import CodeType
from typing import cast

from rlcli.registry import Registry
from rlcli.rewards.combine import Verified
from rlcli.rewards.function_calls import (
    NAMED,
    BadResult,
    Convention,
    Conventions,
    Loaded,
    Options,
    code_of,
    is_async,
    result_per_request,
    run,
    run_concurrently,
    shown,
    verdict_of,
)
from rlcli.types import Verdict, VerifyRequest

NATIVE = "verify(request, *, option=…) or verify(requests, *, option=…)"

FOREIGN: Registry[Conventions] = Registry("reward convention", "rlcli.reward_conventions")
"""Conventions of other frameworks, from entry points."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@cache
def _foreign() -> tuple[Conventions, ...]:
    return tuple(FOREIGN.get(name) for name in FOREIGN.names())


def adapt(function: object, options: Options) -> Loaded:
    """Adapt a function, or an object with rubric functions, to a verifier. Raises TypeError if no convention fits."""
    if not is_rubric(function):
        convention = convention_of(function)
        assert callable(function)  # `convention_of` refuses anything else
        return convention.adapt(function, options)
    if not (foreign := _foreign()):
        raise TypeError("it is an object with reward functions, and no package that calls those is installed")
    return foreign[0].rubric(function)


def is_rubric(value: object) -> bool:
    """True if a value is an object with rubric functions."""
    return not inspect.isclass(value) and (hasattr(value, "funcs") or hasattr(value, "get_reward_funcs"))


def convention_of(function: object) -> Convention:
    """The convention that the function's parameter names match. Raises a TypeError that lists all if none fits."""
    if not callable(function) or inspect.isclass(function):
        kind = "a class" if inspect.isclass(function) else f"of type {type(function).__name__}"
        raise TypeError(f"it is {kind}, not a function")
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    positional = [name for name, parameter in parameters.items() if parameter.kind in _POSITIONAL]
    foreign = [convention for conventions in _foreign() for convention in conventions.functions]
    for convention in foreign:
        if convention.matches(parameters):
            return convention
    # One parameter for the request; those that may be omitted are options.
    if positional and all(parameters[name].default is not inspect.Parameter.empty for name in positional[1:]):
        first = positional[0]
        native = _native_batch if first == "requests" else _native
        return Convention(NATIVE, lambda all_: True, lambda all_: {first}, native)
    texts = "; ".join([NATIVE, *(convention.text for convention in foreign)])
    raise TypeError(f"its parameters ({', '.join(names)}) fit no convention of a verifier; they are {texts}")


def options_of(function: object) -> tuple[dict[str, inspect.Parameter], bool]:
    """The options of a verifier by name (those without a default are required), and whether it takes others too."""
    convention = convention_of(function)
    assert callable(function)  # `convention_of` refuses anything else
    parameters = inspect.signature(function).parameters
    inputs = convention.inputs(parameters)
    options = {
        name: parameter for name, parameter in parameters.items() if parameter.kind in NAMED and name not in inputs
    }
    return options, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def _native(function: Callable[..., object], options: Options) -> Loaded:
    if is_async(function):

        async def verify_async(request: VerifyRequest) -> Verified:
            return _verified(function, await cast("Awaitable[object]", function(request, **options)))

        return run_concurrently(verify_async, prefers_batches=True)

    def verify(requests: Sequence[VerifyRequest]) -> list[Verified]:
        return [_attempt(function, request, options) for request in requests]

    return Loaded(verify, prefers_batches=False)


def _attempt(function: Callable[..., object], request: VerifyRequest, options: Options) -> Verified:
    try:
        return _verified(function, function(request, **options))
    except BaseException as error:  # including SystemExit and KeyboardInterrupt: any exception is a crash
        return error


def _verified(function: Callable[..., object], result: object) -> Verified:
    """Convert a number or numpy scalar to a verdict; return a verdict or None unchanged. Raises `BadResult` for
    anything else, and for a score that is not finite."""
    is_numpy_scalar = type(result).__module__ == "numpy" and getattr(result, "ndim", 1) == 0
    if isinstance(result, Real) or is_numpy_scalar:
        return verdict_of(function, result)
    if isinstance(result, Verdict):
        _check_finite(function, result)
    elif result is not None:
        raise BadResult(function, f"returned {shown(result)}, expected a Verdict or a number")
    elif not _returns_values(function):  # else None means that it does not apply to this row
        raise BadResult(function, "returned None, expected a Verdict or a number (it has no `return` with a value)")
    return result if isinstance(result, Verdict) else None


def _returns_values(function: Callable[..., object]) -> bool:
    """True if a function has a `return` with a value other than the literal None; True if its code is unknown."""
    code = code_of(function)
    return code is None or _has_value(code)


@cache
def _has_value(code: CodeType) -> bool:
    previous: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return True
        if instruction.opname == "RETURN_VALUE":
            # A jump to it comes from a conditional expression.
            is_none = previous is not None and (previous.opname, previous.argval) == ("LOAD_CONST", None)
            if instruction.is_jump_target or not is_none:
                return True
        previous = instruction
    return False


def _check_finite(function: Callable[..., object], verdict: Verdict) -> None:
    numbers: dict[str, object] = {"score": verdict.score, **verdict.parts}  # a verifier may put anything there
    for name, number in numbers.items():
        if isinstance(number, Real) and not math.isfinite(number):
            raise BadResult(function, f"returned a Verdict whose {name} is {number}, expected a finite number")


def _native_batch(function: Callable[..., object], options: Options) -> Loaded:
    def verify(requests: Sequence[VerifyRequest]) -> Sequence[Verified]:
        result = function(list(requests), **options)
        results = run(result) if inspect.isawaitable(result) else result
        return [_each(function, item) for item in result_per_request(function, results, requests, "verdict or number")]

    return Loaded(verify, prefers_batches=True)


def _each(function: Callable[..., object], result: object) -> Verified:
    """The verdict of one result of a list, or its error, which does not affect the other results."""
    try:
        return _verified(function, result)
    except BadResult as error:
        return error
