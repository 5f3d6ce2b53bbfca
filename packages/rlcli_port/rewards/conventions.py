"""The conventions of verl, TRL and Prime Intellect: the arguments each passes, and how its result is read."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from rlcli.rewards.combine import Verified, combine
from rlcli.rewards.function_calls import (
    NAMED,
    BadResult,
    Convention,
    Conventions,
    Loaded,
    Parameters,
    argument_filter,
    awaited,
    is_async,
    missing_parameters,
    number_of,
    result_per_request,
    run,
    run_concurrently,
    shown,
    verdict_of,
)
from rlcli.types import LOGGED, Outcome, Verdict, VerifyRequest

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions", "completion_ids")
TRL_TRAINER = ("trainer_state", "log_extra", "log_metric")
"""Further arguments that TRL's trainer passes to each function."""
MAX_EXTRA_COLUMNS = 16
"""Maximum number of columns that one response's verdict may have in `extra`."""
PRIME = ("completion", "answer", "prompt", "state", "info", "task")

_SHAPE_ERRORS = (TypeError, AttributeError, LookupError)
_WANTS_MESSAGES = re.compile(r"string ind(?:ices|ex)|'str' object")
"""Matches the errors of a function that was given text and reads messages."""
_WANTS_TEXT = re.compile(r"'?(?:list|dict)'?(?: ind|\b)")
"""Matches the errors of a function that was given messages and reads text."""


def verl(function: Callable[..., Any], options: Mapping[str, Any]) -> Loaded:
    """`compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)` -> number or dict with `score`."""
    wanted = argument_filter(function)

    async def verify(request: VerifyRequest) -> Verdict:
        inputs = {
            "data_source": request.data_source,
            "solution_str": request.completion,
            "ground_truth": _stored_truth(request),
            "extra_info": dict(request.extra_info),
        }
        return _of_verl(function, await awaited(function(**wanted(inputs), **options)))

    return run_concurrently(verify, prefers_batches=is_async(function))


def _stored_truth(request: VerifyRequest) -> Any:
    """The ground truth as verl's file holds it: a struct or list, whose text is the request's, else that text."""
    stored = request.extra_info.get("ground_truth")
    if isinstance(stored, dict | list) and json.dumps(stored, ensure_ascii=False) == request.ground_truth:
        return stored
    return request.ground_truth


def _of_verl(function: Callable[..., Any], result: Any) -> Verdict:
    """`acc` states whether the response is right, `pred` is the answer, other numbers are parts. As verl does, use the
    first item of a tuple."""
    if isinstance(result, list | tuple) and result:
        return verdict_of(function, result[0])
    if not isinstance(result, Mapping):
        return verdict_of(function, result, "a number or a dict with 'score'")
    if "score" not in result:
        raise BadResult(function, f"returned {shown(dict(result))}, expected a dict with 'score'")
    score = number_of(function, result["score"], "a number as its score")
    right = number_of(function, result.get("acc", score), "a number as its acc") > 0
    parts = {
        str(name): float(value)
        for name, value in result.items()
        if isinstance(value, Real) and name not in ("score", "acc", "pred")
    }
    answer = result.get("pred")
    return Verdict(score, Outcome.OK if right else Outcome.WRONG, None if answer is None else str(answer), parts)


def trl(function: Callable[..., Any], options: Mapping[str, Any]) -> Loaded:
    """`f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns)` -> list of numbers,
    None for a row that it skips. A call has whole groups: all responses to a prompt, one after another."""
    parameters = inspect.signature(function).parameters
    wanted, messages_first = argument_filter(function), _speaks_of_messages(parameters, ("completions", "prompts"))

    async def batch(requests: Sequence[VerifyRequest]) -> Sequence[Verified]:
        columns = {**_rows_as_columns(requests), **options}
        lacking = missing_parameters(parameters, (*TRL, *TRL_TRAINER, *columns))
        if lacking:
            raise BadResult(
                function,
                f"asks for a column '{lacking[0]}', which the rows lack (they have {', '.join(sorted(columns))}): keep "
                f"it with rlcli prep jsonl --columns {lacking[0]}=THEIRS, or give the parameter a default",
            )

        async def call(as_messages: bool) -> Any:
            inputs = {
                "prompts": [_prompt(request, as_messages) for request in requests],
                "completions": [_completion(request, as_messages) for request in requests],
                "completion_ids": [list(request.completion_ids) for request in requests],
            }
            log = CallLog(function, len(requests))
            trainer = {
                "trainer_state": TrainerState.of(requests),
                "log_extra": log.extra,
                "log_metric": log.metric,
            }
            return await awaited(function(**wanted({**columns, **trainer, **inputs}))), log

        returned, log = await _in_either_shape(call, messages_first)
        scores = result_per_request(function, returned, requests, "number")
        return [_of_trl(function, score, log, index) for index, score in enumerate(scores)]

    return Loaded(lambda requests: run(batch(requests)), prefers_batches=True, groups=True)


def _of_trl(function: Callable[..., Any], score: Any, log: CallLog, index: int) -> Verified:
    """The verdict of one score of a list, or the error about it: the others of the list remain."""
    try:
        if score is None:
            return None
        return replace(
            verdict_of(function, score, "a number for each completion"),
            parts=log.means(),
            extra={column: texts[index] for column, texts in log.columns.items()},
        )
    except BadResult as error:
        return error


@dataclass(frozen=True)
class TrainerState:
    """The fields of TRL's `trainer_state` that reward functions get. Both are 0 outside of training: in a trial, an
    evaluation of a model, `rlcli verifiers run`."""

    global_step: int = 0
    """Steps that are complete when the responses are sampled."""
    max_steps: int = 0
    """Steps of the training."""

    @classmethod
    def of(cls, requests: Sequence[VerifyRequest]) -> TrainerState:
        """The latest of the requests' steps."""
        latest = max(requests, key=lambda request: request.step)
        return cls(max(latest.step - 1, 0), latest.steps)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has global_step and max_steps here, and no {name}")


class CallLog:
    """The log of a function's call on `count` responses: a text for each response, by column, and numbers."""

    def __init__(self, function: Callable[..., Any], count: int) -> None:
        self._function, self._count = function, count
        self.columns: dict[str, list[str]] = {}
        self._metrics: dict[str, list[float]] = {}

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """TRL's `log_extra`: a column of the table of samples. Raises `BadResult`."""
        listed = [None] if isinstance(values, str | bytes) or not isinstance(values, Iterable) else list(values)
        if len(listed) != self._count:
            raise BadResult(
                self._function, f"calls log_extra({column!r:.60}) with {shown(values)}, expected {self._count} values"
            )
        self.columns[str(column)] = [str(value) for value in listed]
        if len(self.columns) > MAX_EXTRA_COLUMNS:
            raise BadResult(self._function, f"calls log_extra with more than {MAX_EXTRA_COLUMNS} columns")

    def metric(self, name: str, value: Any) -> None:
        """TRL's `log_metric`: a number, of which the step's mean is a metric. Raises `BadResult`."""
        number = number_of(self._function, value, f"a number for log_metric({name!r:.60})")
        self._metrics.setdefault(str(name), []).append(number)

    def means(self) -> dict[str, float]:
        """The metrics as parts of a verdict."""
        return {f"{LOGGED}{name}": math.fsum(values) / len(values) for name, values in self._metrics.items()}


def _rows_as_columns(requests: Sequence[VerifyRequest]) -> dict[str, Any]:
    """`ground_truth`, `data_source` and every field of `extra_info`, each as a list; None if a row lacks a field. A
    field with one of these names is the source's own column, as TRL passes it."""
    fields = {name: None for request in requests for name in request.extra_info}
    return {
        "ground_truth": [request.ground_truth for request in requests],
        "data_source": [request.data_source for request in requests],
    } | {name: [request.extra_info.get(name) for request in requests] for name in fields}


def trl_inputs(parameters: Parameters) -> set[str]:
    """The parameters that TRL fills: its own, and those without a default, which are columns of the data."""
    by_name = {name: parameter for name, parameter in parameters.items() if parameter.kind in NAMED}
    return {
        name
        for name, parameter in by_name.items()
        if name in (*TRL, *TRL_TRAINER) or parameter.default is inspect.Parameter.empty
    }


def prime(function: Callable[..., Any], options: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> Loaded:
    """A rubric function by argument name -> number. others: further arguments, which its rubric provides."""
    wanted = argument_filter(function)
    messages_first = _speaks_of_messages(inspect.signature(function).parameters, ("completion", "prompt"))

    async def verify(request: VerifyRequest) -> Verdict:
        async def call(as_messages: bool) -> Any:
            inputs = {
                "prompt": _prompt(request, as_messages),
                "completion": _completion(request, as_messages),
                "answer": request.ground_truth,
                "info": dict(request.extra_info),
                "task": request.data_source,
            }
            ended = {"is_completed": True, "is_truncated": request.finish_reason == "length"}
            state = {**inputs, **ended}
            return await awaited(function(**wanted({**(others or {}), **inputs, "state": state}), **options))

        return verdict_of(function, await _in_either_shape(call, messages_first))

    return run_concurrently(verify, prefers_batches=is_async(function))


def rubric(value: Any) -> Loaded:
    """An object with `funcs` and `weights`, or with methods that return them, as a weighted sum."""
    functions = list(_held(value, "funcs", "get_reward_funcs"))
    weights = [float(weight) for weight in _held(value, "weights", "get_reward_weights") or [1.0] * len(functions)]
    if not functions or len(weights) != len(functions):
        raise TypeError(f"it has {len(functions)} funcs and {len(weights)} weights")
    others = dict(getattr(value, "class_objects", None) or {})
    if getattr(value, "parser", None) is not None:
        others["parser"] = value.parser
    for function in functions:
        lacking = missing_parameters(inspect.signature(function).parameters, (*PRIME, *others))
        if lacking:
            raise TypeError(f"its function {_name(function)} asks for '{lacking[0]}'; there is: {', '.join(PRIME)}")
    loaded = [prime(function, {}, others) for function in functions]
    names = [_name(function) for function in functions]
    unique = [name if names.count(name) == 1 else f"{name}_{index}" for index, name in enumerate(names)]
    by_name = dict(zip(unique, weights, strict=True))

    def verify(requests: Sequence[VerifyRequest]) -> list[Verified]:
        return [
            combine("", by_name, row) for row in zip(*(verifier.verify(requests) for verifier in loaded), strict=True)
        ]

    return Loaded(verify, prefers_batches=any(adapted.prefers_batches for adapted in loaded))


def _held(value: Any, attribute: str, method: str) -> Any:
    held = getattr(value, attribute, None)
    return getattr(value, method)() if held is None and hasattr(value, method) else held


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _speaks_of_messages(parameters: Parameters, names: Iterable[str]) -> bool:
    """True if an annotation of one of `names` contains dicts or messages."""
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
    """The result of `call(as_messages)` for the first shape that it accepts. If it fails on both, raises the error that
    is not about the shape."""
    try:
        return await call(messages_first)
    except BadResult:  # of what it logs: it has accepted the shape
        raise
    except _SHAPE_ERRORS as error:
        try:
            return await call(not messages_first)
        except _SHAPE_ERRORS as other:
            on_text, on_messages = (other, error) if messages_first else (error, other)
            if bool(_WANTS_MESSAGES.search(str(on_text))) == bool(_WANTS_TEXT.search(str(on_messages))):
                raise error from None
            raise (on_messages if _WANTS_MESSAGES.search(str(on_text)) else on_text) from None


CONVENTIONS = Conventions(
    functions=(
        Convention(
            "verl: compute_score(data_source, solution_str, ground_truth, extra_info, …)",
            lambda parameters: "solution_str" in parameters,
            lambda parameters: set(VERL) & set(parameters),
            verl,
        ),
        Convention(
            "TRL: f(prompts, completions, completion_ids, **columns), any of them",
            lambda parameters: bool(set(TRL) & set(parameters)),
            trl_inputs,
            trl,
        ),
        Convention(
            f"Prime Intellect: f({', '.join(PRIME)}), any of them",
            lambda parameters: bool(set(PRIME) & set(parameters)) and not missing_parameters(parameters, PRIME),
            lambda parameters: set(PRIME) & set(parameters),
            prime,
        ),
    ),
    rubric=rubric,
)
"""In the order in which they are tried: a function may have parameters of several."""
