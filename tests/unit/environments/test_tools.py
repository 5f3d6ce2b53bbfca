"""Plain functions as tools: their schemas, what cannot be one, and what a call gets back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest
from PIL import Image

from rlcli.environments.calls import parse
from rlcli.environments.environment import opening_of, reply_of
from rlcli.environments.tools import (
    NoSchema,
    ToolEnvironment,
    WrongArgument,
    argument_of,
    content_of,
    schema_of,
)


def add(a: int, b: float = 0.5, *, note: str | None = None) -> float:
    """Adds two numbers
    and returns the sum.

    Args:
        a: the first
        b (float): the second, or a half

    Returns:
        The sum.
    """
    return a / 0 if note == "divide" else a + b


def pick(kind: Literal["x", "y"], places: list[int], rest: dict[str, Any], either: int | str) -> Any:
    """Picks."""
    return {"kind": kind, "places": places}


def no_docstring(a: int) -> int:
    return a


def no_type(a) -> int:  # type: ignore[no-untyped-def]
    """Has no type."""
    return int(a)


def no_json(a: complex) -> None:
    """Takes a complex number."""


def no_names(*numbers: int) -> None:
    """Takes any."""


def no_such_annotation(a: Unheard) -> None:  # type: ignore[name-defined] # noqa: F821
    """Has an annotation of nothing."""


def test_only_images_make_parts() -> None:
    image = Image.new("RGB", (2, 2))
    assert content_of([image, "two"]) == [{"type": "image", "image": image}, {"type": "text", "text": "two"}]
    assert content_of([{"type": "image", "title": "cat"}]) == '[{"type": "image", "title": "cat"}]'
    savable = type("Savable", (), {"save": lambda self: None, "__str__": lambda self: "saved"})()
    assert content_of(savable) == '"saved"'


def test_a_schema_comes_from_the_signature_and_the_docstring() -> None:
    assert schema_of(add)["function"] == {
        "name": "add",
        "description": "Adds two numbers and returns the sum.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "the first"},
                "b": {"type": "number", "description": "the second, or a half"},
                "note": {"type": "string", "nullable": True},
            },
            "required": ["a"],
        },
    }
    assert schema_of(pick)["function"]["parameters"]["properties"] == {
        "kind": {"enum": ["x", "y"]},
        "places": {"type": "array", "items": {"type": "integer"}},
        "rest": {"type": "object"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    }


def test_it_is_what_transformers_makes_of_the_same_function() -> None:
    from transformers.utils import get_json_schema

    def scale(a: int, factors: list[float], by: str = "all") -> float:
        """Scales a number.

        Args:
            a: the number
            factors: what to scale it by
            by: which of them
        """
        return a

    theirs = get_json_schema(scale)
    theirs["function"].pop("return", None)
    assert schema_of(scale) == theirs


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "the tool no_docstring has no docstring"),
        (no_type, "the parameter a of the tool no_type has no type"),
        (no_json, "the parameter a of the tool no_json has the type <class 'complex'>, which is no JSON"),
        (no_names, r"the tool no_names takes \*numbers: 'int'"),
        (no_such_annotation, "the tool no_such_annotation has an annotation that cannot be read: name 'Unheard'"),
    ],
)
def test_what_cannot_be_a_tool_is_named(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(NoSchema, match=message):
        schema_of(function)


def called(name: str, arguments: Any) -> dict[str, Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("add", {"a": 1, "b": 2}, "3"),
        ("pick", {"kind": "x", "places": [1], "rest": {}, "either": 1}, '{"kind": "x", "places": [1]}'),
        ("add", {}, "error: add: missing a required argument: 'a'"),
        ("add", {"a": 1, "c": 2}, "error: add: got an unexpected keyword argument 'c'"),
        ("add", {"a": "1", "b": 2}, "3"),
        ("add", '{"a": 1, "b": 2}', "3"),
        ("add", "1", "error: add: the arguments are not a JSON object"),
        ("add", {"a": "one"}, 'error: add: a is "one", and should be a whole number'),
        ("add", {"a": True}, "error: add: a is true, and should be a whole number"),
        ("add", {"a": 1, "note": ["x"]}, 'error: add: note is ["x"], and should be a text'),
        (
            "pick",
            {"kind": "z", "places": [], "rest": {}, "either": 1},
            'error: pick: kind is "z", and should be one of "x", "y"',
        ),
        ("add", {"a": 1, "note": "divide"}, "error: ZeroDivisionError: division by zero"),
        ("sub", {}, "error: there is no tool sub, only add, pick"),
    ],
)
def test_a_call_gets_its_result_or_what_was_wrong_with_it(name: str, arguments: Any, content: str) -> None:
    environment = ToolEnvironment([add, pick])
    opening = opening_of(list(environment.reset({"messages": [{"role": "user", "content": "1+2?"}]}, 0)))
    assert [tool["function"]["name"] for tool in opening.tools] == ["add", "pick"]
    reply = reply_of(list(environment.step(called(name, arguments))))
    assert reply.messages == [{"role": "tool", "name": name, "tool_call_id": "call00001", "content": content}]
    assert (reply.done, reply.info["failed_calls"]) == (False, int(content.startswith("error")))
    assert reply_of(list(environment.step({"role": "assistant", "content": "3"}))).done


@pytest.mark.parametrize(
    ("value", "schema", "read"),
    [
        ("007", {"type": "string"}, "007"),
        (7, {"type": "string"}, "7"),
        ("null", {"type": "string", "nullable": True}, "null"),
        ("null", {"type": "integer", "nullable": True}, None),
        (None, {"type": "integer", "nullable": True}, None),
        (2.0, {"type": "integer"}, 2),
        ("1e3", {"type": "number"}, 1000.0),
        ("FALSE", {"type": "boolean"}, False),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        (["1"], {"type": "array", "items": {"type": "integer"}}, [1]),
        ("3", {"enum": [1, 3]}, 3),
        ("3", {"type": ["integer", "null"]}, 3),
        ("3", {"anyOf": [{"type": "boolean"}, {"type": "integer"}]}, 3),
        ("3", {}, "3"),
        ("3", {"type": {"of": "an environment"}}, "3"),
    ],
)
def test_an_argument_is_read_by_its_schema(value: Any, schema: dict[str, Any], read: Any) -> None:
    parsed = argument_of(value, schema)
    assert (parsed, type(parsed)) == (read, type(read))


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        (True, {"type": "string"}, "a text"),
        ("007", {"type": "integer"}, "a whole number"),
        (1.5, {"type": "integer"}, "a whole number"),
        (True, {"type": "number"}, "a number"),
        ("NaN", {"type": "number"}, "a number"),
        (1, {"type": "boolean"}, "true or false"),
        ("[" * 100_000, {"type": "array"}, "a list"),
        ("x", {"anyOf": [{"type": "boolean"}, {"type": "integer"}]}, "true or false or a whole number"),
    ],
)
def test_an_argument_that_its_schema_does_not_allow_is_refused(value: Any, schema: Any, expected: str) -> None:
    with pytest.raises(WrongArgument, match=f"^{expected}$"):
        argument_of(value, schema)


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', ["error: the call cannot be read"]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ["1.5"]),
        (
            '<tool_call>add</tool_call><tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>',
            ["error: the call cannot be read", "2.5"],
        ),
        ('<tool_call>[{"name": "add", "arguments": {"a": 3}}, {}]</tool_call>', ["3.5", "error: the call cannot"]),
    ],
)
def test_a_call_that_cannot_be_read_is_answered(text: str, answers: list[str]) -> None:
    parsed = parse(text, "hermes")
    reply = reply_of(list(ToolEnvironment([add]).step(parsed.message)))
    assert not reply.done
    assert [
        str(message["content"])[: len(answer)] for message, answer in zip(reply.messages, answers, strict=True)
    ] == (answers)
    assert len({message["tool_call_id"] for message in reply.messages}) == len(answers)
    failed = sum(answer.startswith("error") for answer in answers)
    assert parsed.failed + reply.info["failed_calls"] == failed  # each is counted once


async def later(number: int) -> int:
    """Waits, and returns a number.

    Args:
        number: which
    """
    await asyncio.sleep(0)
    if number < 0:
        raise ValueError("negative")
    return number


def test_async_functions_are_awaited_in_order() -> None:
    order: list[str] = []

    def plain(number: int) -> int:
        """Notes a number."""
        order.append(f"plain {number}")
        return number

    async def slow(number: int) -> int:
        """Notes a number, late."""
        await asyncio.sleep(0.01)
        order.append(f"slow {number}")
        return number

    calls = [("slow", 1), ("plain", 2), ("later", -1), ("later", "x"), ("later", 3)]
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": {"number": number}}}
            for index, (name, number) in enumerate(calls)
        ],
    }
    reply = reply_of(list(asyncio.run(ToolEnvironment([plain, slow, later]).step(message))))
    assert [message["content"] for message in reply.messages] == [
        *("1", "2", "error: ValueError: negative", 'error: later: number is "x", and should be a whole number', "3")
    ]
    assert order == ["slow 1", "plain 2"]


def test_a_function_that_returns_an_awaitable_is_awaited() -> None:
    def wrapped(number: int) -> Any:
        """Wraps an async function."""
        return later(number)

    reply = reply_of(list(ToolEnvironment([wrapped]).step(called("wrapped", {"number": 4}))))
    assert [message["content"] for message in reply.messages] == ["4"]
