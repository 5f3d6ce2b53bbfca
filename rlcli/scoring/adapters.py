"""Functions that were written for others, as verifiers: what a function is, its parameters' names say.

| convention     | recognised by a parameter                                   | gives                                 |
|----------------|-------------------------------------------------------------|---------------------------------------|
| ours           | the only positional one                                     | a `Verdict`, or None: not this row    |
| ours, in batch | the only positional one, named `requests`                   | a list of these                       |
| verl           | `solution_str`                                              | a number, or a dict with `score`      |
| TRL            | `completions`, `completion_ids` or `prompts`                | a list of numbers; None: not this row |
| PrimeIntellect | `completion`, `answer`, `prompt`, `state`, `info` or `task` | a number                              |

Each may be `async`. Parameters beyond the convention's own are options (for TRL those that have a default). A score of
others is OK above 0 and WRONG otherwise. An object with `funcs` and `weights` is a weighted sum of rubric functions.

TRL and Prime Intellect hand a completion on as text or as chat messages, by the dataset. Ours are texts; a function
that raises what messages would cure, or whose annotation speaks of them, is given `[{"role": "assistant", …}]`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from rlcli.scoring.combine import Verified, combine
from rlcli.types import Outcome, Verdict, VerifyRequest

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions", "completion_ids")
PRIME = ("completion", "answer", "prompt", "state", "info", "task")

CONVENTIONS = (
    "verify(request, *, option=…) or verify(requests, *, option=…); "
    "verl: compute_score(data_source, solution_str, ground_truth, extra_info, …); "
    "TRL: f(prompts, completions, completion_ids, **columns), any of them; "
    f"Prime Intellect: f({', '.join(PRIME)}), any of them"
)

Parameters = Mapping[str, inspect.Parameter]

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SHAPE_ERRORS = (TypeError, AttributeError, LookupError)


@dataclass(frozen=True)
class Loaded:
    """A verifier of any convention. verify: what it makes of each request; raises where the whole batch failed. many:
    whether it gains from being given many requests at once."""

    verify: Callable[[Sequence[VerifyRequest]], Sequence[Verified]]
    many: bool


@dataclass(frozen=True)
class Convention:
    """inputs: of the parameters, those that a caller of this convention fills. adapt: with the function, and the
    options that are given to it in every call."""

    inputs: Callable[[Parameters], set[str]]
    adapt: Callable[[Callable[..., Any], Mapping[str, Any]], Loaded]


def adapt(function: Any, options: Mapping[str, Any]) -> Loaded:
    """A function, or an object with rubric functions, as a verifier. Raises TypeError for what fits no convention."""
    return _rubric(function) if is_rubric(function) else convention_of(function).adapt(function, options)


def is_rubric(value: Any) -> bool:
    """Whether it is an object with rubric functions."""
    return not inspect.isclass(value) and (hasattr(value, "funcs") or hasattr(value, "get_reward_funcs"))


def convention_of(function: Callable[..., Any]) -> Convention:
    """The convention that the names of its parameters tell. Raises TypeError that lists both where none fits."""
    if not callable(function) or inspect.isclass(function):
        kind = "a class" if inspect.isclass(function) else f"of type {type(function).__name__}"
        raise TypeError(f"it is {kind}, not a function")
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    positional = [name for name, one in parameters.items() if one.kind in _POSITIONAL]
    if "solution_str" in names:
        return Convention(lambda all_: set(VERL) & set(all_), _verl)
    if set(names) & set(TRL):
        return Convention(_columns, _trl)
    if set(names) & set(PRIME) and not _lacking(parameters, PRIME):
        return Convention(lambda all_: set(PRIME) & set(all_), _prime)
    if positional == ["requests"]:
        return Convention(lambda all_: {"requests"}, _native_batch)
    if len(positional) == 1:
        return Convention(lambda all_: set(positional), _native)
    raise TypeError(f"its parameters ({', '.join(names)}) fit no convention of a verifier; those are {CONVENTIONS}")


def options_of(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The options of a verifier by name (those without a default must be given), and whether it takes others too."""
    convention = convention_of(function)
    parameters = inspect.signature(function).parameters
    inputs = convention.inputs(parameters)
    options = {name: one for name, one in parameters.items() if one.kind in _NAMED and name not in inputs}
    return options, any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def _native(function: Callable[..., Any], options: Mapping[str, Any]) -> Loaded:
    if _is_async(function):
        return _gathered(lambda request: function(request, **options), many=True)

    def verify(requests: Sequence[VerifyRequest]) -> list[Verified]:
        return [_attempt(function, request, options) for request in requests]

    return Loaded(verify, many=False)


def _attempt(function: Callable[..., Verified], request: VerifyRequest, options: Mapping[str, Any]) -> Verified:
    try:
        return function(request, **options)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: whatever it raises, it crashed
        return error


def _native_batch(function: Callable[..., Any], options: Mapping[str, Any]) -> Loaded:
    def verify(requests: Sequence[VerifyRequest]) -> Sequence[Verified]:
        result = function(list(requests), **options)
        return _one_each(_run(result) if inspect.isawaitable(result) else result, requests)

    return Loaded(verify, many=True)


def _verl(function: Callable[..., Any], options: Mapping[str, Any]) -> Loaded:
    """`compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)` -> number or dict with `score`."""
    wanted = _wanted(function)

    async def one(request: VerifyRequest) -> Verdict:
        inputs = {
            "data_source": request.data_source,
            "solution_str": request.completion,
            "ground_truth": request.ground_truth,
            "extra_info": dict(request.extra_info),
        }
        return _of_verl(await _awaited(function(**wanted(inputs), **options)))

    return _gathered(one, many=_is_async(function))


def _of_verl(result: Any) -> Verdict:
    """`acc` says whether the response is right, `pred` is the answer, other numbers are parts."""
    if not isinstance(result, Mapping):
        return _verdict(result)
    if "score" not in result:
        raise TypeError(f"it returned a dict without 'score': {dict(result)!r:.200}")
    score = _number(result["score"])
    right = _number(result.get("acc", score)) > 0
    parts = {
        str(name): float(value)
        for name, value in result.items()
        if isinstance(value, Real) and name not in ("score", "acc", "pred")
    }
    answer = result.get("pred")
    return Verdict(score, Outcome.OK if right else Outcome.WRONG, None if answer is None else str(answer), parts)


def _trl(function: Callable[..., Any], options: Mapping[str, Any]) -> Loaded:
    """`f(prompts, completions, completion_ids, **columns)` -> list of numbers, None where it passes."""
    parameters = inspect.signature(function).parameters
    wanted, messages_first = _wanted(function), _speaks_of_messages(parameters, ("completions", "prompts"))

    async def batch(requests: Sequence[VerifyRequest]) -> Sequence[Verified]:
        columns = {**_rows_as_columns(requests), **options}
        lacking = _lacking(parameters, (*TRL, *columns))
        if lacking:
            raise ValueError(f"it asks for a column '{lacking[0]}'; there is: {', '.join(sorted(columns))}")

        async def call(as_messages: bool) -> Any:
            given = {
                "prompts": [_prompt(request, as_messages) for request in requests],
                "completions": [_completion(request, as_messages) for request in requests],
                "completion_ids": [list(request.completion_ids) for request in requests],
            }
            return await _awaited(function(**wanted(columns | given)))

        scores = _one_each(await _in_either_shape(call, messages_first), requests)
        return [None if score is None else _verdict(score) for score in scores]

    return Loaded(lambda requests: _run(batch(requests)), many=True)


def _rows_as_columns(requests: Sequence[VerifyRequest]) -> dict[str, Any]:
    """`ground_truth`, `data_source` and every field of `extra_info`, a list each; None where a row lacks a field."""
    fields = {name: None for request in requests for name in request.extra_info}
    return {name: [request.extra_info.get(name) for request in requests] for name in fields} | {
        "ground_truth": [request.ground_truth for request in requests],
        "data_source": [request.data_source for request in requests],
    }


def _columns(parameters: Parameters) -> set[str]:
    """What TRL fills: its own three, and what has no default is a column of the data."""
    named = {name: one for name, one in parameters.items() if one.kind in _NAMED}
    return {name for name, one in named.items() if name in TRL or one.default is inspect.Parameter.empty}


def _prime(function: Callable[..., Any], options: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> Loaded:
    """A rubric function by argument name -> number. others: further arguments, which its rubric holds."""
    wanted = _wanted(function)
    messages_first = _speaks_of_messages(inspect.signature(function).parameters, ("completion", "prompt"))

    async def one(request: VerifyRequest) -> Verdict:
        async def call(as_messages: bool) -> Any:
            given = {
                "prompt": _prompt(request, as_messages),
                "completion": _completion(request, as_messages),
                "answer": request.ground_truth,
                "info": dict(request.extra_info),
                "task": request.data_source,
            }
            return await _awaited(function(**wanted({**(others or {}), **given, "state": dict(given)}), **options))

        return _verdict(await _in_either_shape(call, messages_first))

    return _gathered(one, many=_is_async(function))


def _rubric(value: Any) -> Loaded:
    """An object with `funcs` and `weights`, or with methods that give them, as a weighted sum."""
    functions = list(_held(value, "funcs", "get_reward_funcs"))
    weights = [float(weight) for weight in _held(value, "weights", "get_reward_weights") or [1.0] * len(functions)]
    if not functions or len(weights) != len(functions):
        raise TypeError(f"it has {len(functions)} funcs and {len(weights)} weights")
    others = dict(getattr(value, "class_objects", None) or {})
    if getattr(value, "parser", None) is not None:
        others["parser"] = value.parser
    for function in functions:
        lacking = _lacking(inspect.signature(function).parameters, (*PRIME, *others))
        if lacking:
            raise TypeError(f"its function {_name(function)} asks for '{lacking[0]}'; there is: {', '.join(PRIME)}")
    loaded = [_prime(function, {}, others) for function in functions]
    names = [_name(function) for function in functions]
    unique = [name if names.count(name) == 1 else f"{name}_{index}" for index, name in enumerate(names)]
    by_name = dict(zip(unique, weights, strict=True))

    def verify(requests: Sequence[VerifyRequest]) -> list[Verified]:
        return [combine("", by_name, row) for row in zip(*(one.verify(requests) for one in loaded), strict=True)]

    return Loaded(verify, many=any(one.many for one in loaded))


def _held(value: Any, attribute: str, method: str) -> Any:
    held = getattr(value, attribute, None)
    return getattr(value, method)() if held is None and hasattr(value, method) else held


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _lacking(parameters: Parameters, available: Iterable[str]) -> list[str]:
    """The parameters that must be given and are not available."""
    there, empty = set(available), inspect.Parameter.empty
    return [
        name for name, one in parameters.items() if one.kind in _NAMED and one.default is empty and name not in there
    ]


def _wanted(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Picks, of what there is, what the function declares: all of it where it takes `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return dict
    return lambda there: {name: value for name, value in there.items() if name in parameters}


def _speaks_of_messages(parameters: Parameters, names: Iterable[str]) -> bool:
    """Whether an annotation of one of `names` has dicts in it, or messages."""
    annotations = [str(parameters[name].annotation) for name in names if name in parameters]
    return any("dict" in text.lower() or "message" in text.lower() for text in annotations)


def _completion(request: VerifyRequest, as_messages: bool) -> Any:
    return [{"role": "assistant", "content": request.completion}] if as_messages else request.completion


def _prompt(request: VerifyRequest, as_messages: bool) -> Any:
    """The chat so far, or the text of its last message."""
    if as_messages:
        return [dict(message) for message in request.prompt]
    return request.prompt[-1]["content"] if request.prompt else ""


async def _in_either_shape(call: Callable[[bool], Awaitable[Any]], messages_first: bool) -> Any:
    """What `call(as_messages)` gives in the first shape that it does not stumble over."""
    try:
        return await call(messages_first)
    except _SHAPE_ERRORS as error:
        try:
            return await call(not messages_first)
        except _SHAPE_ERRORS as other:
            shapes = ("messages", "text") if messages_first else ("text", "messages")
            told = [f"given {shape}, {type(e).__name__}: {e}" for shape, e in zip(shapes, (error, other), strict=True)]
            raise TypeError("; ".join(told)) from error


def _verdict(score: Any) -> Verdict:
    value = _number(score)
    return Verdict(value, Outcome.OK if value > 0 else Outcome.WRONG)


def _number(value: Any) -> float:
    if value is None or isinstance(value, str):
        raise TypeError(f"it returned {value!r:.200}, not a number")
    return float(value)


def _one_each(results: Any, requests: Sequence[VerifyRequest]) -> list[Any]:
    given = list(results)
    if len(given) != len(requests):
        raise ValueError(f"it returned {len(given)} verdicts for {len(requests)} requests")
    return given


def _is_async(function: Any) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - of an object, which may itself be no coroutine function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _gathered(one: Callable[[VerifyRequest], Awaitable[Verified]], *, many: bool) -> Loaded:
    async def attempt(request: VerifyRequest) -> Verified:
        try:
            return await one(request)
        except BaseException as error:  # whatever it raises, it crashed
            return error

    async def all_of(requests: Sequence[VerifyRequest]) -> list[Verified]:
        return await asyncio.gather(*map(attempt, requests))

    return Loaded(lambda requests: _run(all_of(requests)), many)


_runner: asyncio.Runner | None = None


def _run(awaitable: Awaitable[Any]) -> Any:
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
