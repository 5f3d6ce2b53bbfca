"""Plain functions as tools of a conversation. It runs in the environment's process, with the standard library alone."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

JSON_TYPES: dict[Any, str] = {
    **{str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array", tuple: "array"},
    **{type(None): "null"},
}


class NoSchema(Exception):
    """A function that cannot be a tool: the text names it, and what it lacks."""


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a tool, from its type hints, its docstring's first paragraph and the lines `name: …` of the
    part `Args:`. Raises `NoSchema`.

    >>> def add(a: int, b: float = 0.5) -> float:
    ...     '''Adds two numbers.
    ...
    ...     Args:
    ...         a: the first
    ...     '''
    >>> found = schema_of(add)["function"]
    >>> found["description"], found["parameters"]["properties"]["a"], found["parameters"]["required"]
    ('Adds two numbers.', {'type': 'integer', 'description': 'the first'}, ['a'])
    """
    name = function.__name__
    text = inspect.getdoc(function) or ""
    if not text:
        raise NoSchema(f"the tool {name} has no docstring that describes it to the model")
    described = dict(re.findall(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.+)$", text.partition("Args:")[2], re.MULTILINE))
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # a name in an annotation that does not exist
        raise NoSchema(f"the tool {name} has an annotation that cannot be read: {error}") from error
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise NoSchema(f"the tool {name} takes {parameter}, which has no name that a model could give")
        if parameter.name not in hints:
            raise NoSchema(f"the parameter {parameter.name} of the tool {name} has no type")
        properties[parameter.name] = _json_type(hints[parameter.name], f"{parameter.name} of the tool {name}")
        if parameter.name in described:
            properties[parameter.name]["description"] = described[parameter.name].strip()
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    description = re.split(r"\n\s*\n|\n\s*Args:", text)[0].replace("\n", " ")
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _json_type(hint: Any, of: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        kinds = [_json_type(one, of) for one in arguments if one is not type(None)]
        found = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        return found | {"nullable": True} if type(None) in arguments else found
    if (origin or hint) in (list, tuple, Sequence):
        return {"type": "array"} | ({"items": _json_type(arguments[0], of)} if arguments else {})
    if (origin or hint) in (dict, Mapping):
        return {"type": "object"}
    if hint not in JSON_TYPES:
        raise NoSchema(f"the parameter {of} has the type {hint}, which is no JSON")
    return {"type": JSON_TYPES[hint]}


class ToolEnvironment:
    """The row's own messages, and functions that the policy may call; it ends with a turn without a call. A call that
    is wrong or raises is answered with the error, so that the policy can correct it.

    A function returns a text, anything that JSON has, a picture of Pillow, or a list of texts and pictures, also as
    parts of a message's content."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self.functions = {function.__name__: function for function in functions}
        self.schemas = [schema_of(function) for function in functions]

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        return list(row["messages"]), self.schemas

    def step(self, message: Mapping[str, Any]) -> Any:
        calls = message.get("tool_calls") or []
        results = [self._result(call) for call in calls]
        failed = sum(isinstance(content, str) and content.startswith("error: ") for content in results)
        answers = [
            {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": content}
            for call, content in zip(calls, results, strict=True)
        ]
        return answers, 0.0, not calls, {"tool_calls": len(calls), "failed_calls": failed}

    def _result(self, call: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        function = self.functions.get(name)
        if function is None:
            return f"error: there is no tool {name}, only {', '.join(self.functions)}"
        try:
            bound = inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return f"error: {name}: {error}"
        try:
            returned = function(*bound.args, **bound.kwargs)
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"
        return content_of(returned)


def content_of(returned: Any) -> str | list[dict[str, Any]]:
    """What a tool returned as a message's content: parts if it has pictures, else text.

    >>> content_of([1, "two"]), content_of([{"type": "image", "image": b"..."}, "a cat"])
    ('[1, "two"]', [{'type': 'image', 'image': b'...'}, {'type': 'text', 'text': 'a cat'}])
    """
    if isinstance(returned, str):
        return returned
    every = returned if isinstance(returned, list | tuple) else [returned]
    if not any(_is_picture(one) for one in every):
        return json.dumps(returned, default=str)
    return [_content_part(one) for one in every]


def _is_picture(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("type") == "image" and "image" in value
    return any(one.__module__.startswith("PIL.") for one in type(value).__mro__)


def _content_part(value: Any) -> dict[str, Any]:
    if _is_picture(value):
        return value if isinstance(value, dict) else {"type": "image", "image": value}
    if isinstance(value, dict) and value.get("type") == "text":
        return value
    return {"type": "text", "text": value if isinstance(value, str) else json.dumps(value, default=str)}
