"""Plain functions as tools of a conversation. It runs in the environment's process, with the standard library alone."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, cast

if TYPE_CHECKING:
    from rlcli.environments.chat_messages import Message, ToolCall
    from rlcli.support.json_types import JsonValue

    Content: TypeAlias = str | list[dict[str, object]]
    """Content of a message: text, or parts of which some are images."""
    Answer: TypeAlias = dict[str, object]
    """Message of a tool: `role`, `name`, `tool_call_id` and `content`."""
    ToolReply: TypeAlias = tuple[list[Answer], float, bool, dict[str, int]]
    """Messages, reward, whether the conversation ends, and the numbers of calls and of failed calls."""

JSON_TYPES: dict[object, str] = {
    **{str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array", tuple: "array"},
    **{type(None): "null"},
}


StepResult: TypeAlias = Any
"""`ToolReply`, or an awaitable of one if a called function is async. It is `Any` because a subclass without async
functions unpacks it as it is."""


class ParametersSchema(TypedDict):
    """JSON schema of a function's parameters."""

    type: str
    """"object"."""
    properties: dict[str, dict[str, JsonValue]]
    """JSON schema of each parameter, by name."""
    required: list[str]
    """Names of the parameters without a default."""


class FunctionSchema(TypedDict):
    """Description of a function."""

    name: str
    """Its name."""
    description: str
    """First paragraph of its docstring."""
    parameters: ParametersSchema
    """Its parameters."""


class FunctionToolSchema(TypedDict):
    """A function as a tool, as OpenAI's protocol describes it."""

    type: str
    """"function"."""
    function: FunctionSchema
    """The function."""


class NoSchema(Exception):
    """A function that cannot be a tool: the text names it, and what it lacks."""


def schema_of(function: Callable[..., object]) -> FunctionToolSchema:
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
    properties: dict[str, dict[str, JsonValue]] = {}
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
    parameters: ParametersSchema = {"type": "object", "properties": properties, "required": required}
    description = re.split(r"\n\s*\n|\n\s*Args:", text)[0].replace("\n", " ")
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _json_type(hint: object, parameter: str) -> dict[str, JsonValue]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        kinds = [_json_type(argument, parameter) for argument in arguments if argument is not type(None)]
        schema: dict[str, JsonValue] = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        return schema | {"nullable": True} if type(None) in arguments else schema
    if (origin or hint) in (list, tuple, Sequence):
        return {"type": "array"} | ({"items": _json_type(arguments[0], parameter)} if arguments else {})
    if (origin or hint) in (dict, Mapping):
        return {"type": "object"}
    if hint not in JSON_TYPES:
        raise NoSchema(f"the parameter {parameter} has the type {hint}, which is no JSON")
    return {"type": JSON_TYPES[hint]}


class WrongArgument(ValueError):
    """A value that the schema of its parameter does not allow: the text says what it should be."""


_NOUNS = {"string": "a text", "integer": "a whole number", "number": "a number", "boolean": "true or false"}
_NOUNS |= {"object": "an object", "array": "a list", "null": "null"}


def argument_of(value: JsonValue, schema: Mapping[str, JsonValue]) -> JsonValue:
    """A value that the policy wrote, as the JSON schema of its parameter says: a text stays a text where one is
    expected, and is read as JSON elsewhere. Raises `WrongArgument`.

    >>> argument_of("007", {"type": "string"}), argument_of("7", {"type": "integer"})
    ('007', 7)
    >>> argument_of("[1, 2]", {"type": "array", "items": {"type": "integer"}}), argument_of("True", {"type": "boolean"})
    ([1, 2], True)
    """
    kinds = schema.get("anyOf") or schema.get("oneOf")
    kind = schema.get("type")
    if kinds is None and isinstance(kind, list):
        kinds = [{**schema, "type": each} for each in kind]
    if isinstance(kinds, list):
        return _first_kind(value, [kind for kind in kinds if isinstance(kind, Mapping)], bool(schema.get("nullable")))
    if schema.get("nullable") and (value is None or (value in ("null", "None") and kind != "string")):
        return None
    members, items = schema.get("enum"), schema.get("items")
    if isinstance(members, list):
        return _member_of(value, members)
    result = _of_kind(value, kind)
    if kind == "array" and isinstance(result, list) and isinstance(items, Mapping):
        return [argument_of(item, items) for item in result]
    return result


def _first_kind(value: JsonValue, kinds: Sequence[Mapping[str, JsonValue]], nullable: bool) -> JsonValue:
    """The value by the first of several schemas that it can be read by; a text as a text, if one of them allows it."""
    if value is None and nullable:
        return None
    if isinstance(value, str) and any(kind.get("type") == "string" and "enum" not in kind for kind in kinds):
        return value
    errors = []
    for kind in kinds:
        try:
            return argument_of(value, kind)
        except WrongArgument as error:
            errors.append(str(error))
    raise WrongArgument(" or ".join(dict.fromkeys(errors)))


def _member_of(value: JsonValue, members: Sequence[JsonValue]) -> JsonValue:
    """The member of an enumeration that is equal to a value, or that its text stands for."""
    for member in members:
        if type(member) is type(value) and member == value:
            return member
    for member in members:
        if isinstance(value, str) and not isinstance(member, str) and json.dumps(member) == value.strip():
            return member
    raise WrongArgument(f"one of {', '.join(json.dumps(member, default=str) for member in members)}")


def _of_kind(value: JsonValue, kind: JsonValue) -> JsonValue:
    """The value as one of a JSON type, where nothing is lost."""
    if not isinstance(kind, str) or kind not in _NOUNS:  # any
        return value
    if kind == "string":
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return json.dumps(value)
        raise WrongArgument(_NOUNS[kind])
    if isinstance(value, str):
        value = _read_text(value, kind)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    allowed: dict[str, type | tuple[type, ...]] = {
        **{"integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list},
        "null": type(None),
    }
    is_boolean, is_infinite = isinstance(value, bool), isinstance(value, float) and not math.isfinite(value)
    if not isinstance(value, allowed[kind]) or is_infinite or (is_boolean and kind != "boolean"):
        raise WrongArgument(_NOUNS[kind])
    return value


def _read_text(text: str, kind: str) -> JsonValue:
    """A text as JSON; booleans and null also as Python writes them."""
    words: dict[str, bool | None] = {}
    if kind in ("boolean", "null"):
        words = {"true": True, "false": False} if kind == "boolean" else {"none": None}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    try:
        value: JsonValue = json.loads(text)
    except (ValueError, RecursionError):
        raise WrongArgument(_NOUNS[kind]) from None
    return value


class ToolEnvironment:
    """The row's own messages, and functions that the policy may call; it ends with a turn without a call. A call that
    cannot be read, is wrong or raises is answered with the error, so that the policy can correct it.

    Arguments are read by the schema (`argument_of`). Calls run one after another; an async function is awaited. A
    function returns a text, anything that JSON has, an image of Pillow, or a list of texts and images, also as
    parts of a message's content."""

    def __init__(self, functions: Sequence[Callable[..., object]]) -> None:
        self.functions = {function.__name__: function for function in functions}
        self.schemas = [schema_of(function) for function in functions]
        self._properties = {
            schema["function"]["name"]: schema["function"]["parameters"]["properties"] for schema in self.schemas
        }

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[list[object], list[FunctionToolSchema]]:
        return list(row["messages"]), self.schemas

    def step(self, message: Mapping[str, object]) -> StepResult:
        """The reply to a turn; an awaitable of it if one of the called functions is async."""
        turn = cast("Message", message)  # of the policy
        names = [call["function"]["name"] for call in turn.get("tool_calls") or []]
        if any(inspect.iscoroutinefunction(self.functions.get(name)) for name in names):
            return self._stepped(turn)
        return _reply(turn, [self._called(call) for call in turn.get("tool_calls") or []])

    async def _stepped(self, message: Message) -> ToolReply:
        contents: list[Content] = []
        for call in message.get("tool_calls") or []:
            if inspect.iscoroutinefunction(self.functions.get(call["function"]["name"])):
                contents.append(await self._awaited(call))
            else:  # it may block
                contents.append(await asyncio.to_thread(self._called, call))
        return _reply(message, contents)

    def _called(self, call: ToolCall) -> Content:
        """Call a plain function; returns its result as a message's content."""
        try:
            function, arguments = self._bound(call)
        except WrongCall as error:
            return f"error: {error}"
        try:
            returned = function(*arguments.args, **arguments.kwargs)
            if inspect.isawaitable(returned):  # of a function that only wraps an async one
                returned = asyncio.run(_result(returned))
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"
        return content_of(returned)

    async def _awaited(self, call: ToolCall) -> Content:
        """Call an async function; returns its result as a message's content."""
        try:
            function, arguments = self._bound(call)
        except WrongCall as error:
            return f"error: {error}"
        try:
            returned = function(*arguments.args, **arguments.kwargs)
            if inspect.isawaitable(returned):
                returned = await returned
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"
        return content_of(returned)

    def _bound(self, call: ToolCall) -> tuple[Callable[..., object], inspect.BoundArguments]:
        """The function of a call, and its arguments as its schema reads them. Raises `WrongCall`."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        function = self.functions.get(name)
        if function is None:
            raise WrongCall(f"there is no tool {name}, only {', '.join(self.functions)}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, Mapping):
            raise WrongCall(f"{name}: the arguments are not a JSON object")
        schemas = self._properties[name]
        values: dict[str, JsonValue] = {}
        for parameter, value in arguments.items():
            try:
                values[parameter] = argument_of(value, schemas[parameter]) if parameter in schemas else value
            except WrongArgument as error:
                shown = json.dumps(value, default=str)[:100]
                raise WrongCall(f"{name}: {parameter} is {shown}, and should be {error}") from None
        try:
            return function, inspect.signature(function).bind(**values)
        except TypeError as error:
            raise WrongCall(f"{name}: {error}") from None


class WrongCall(Exception):
    """A call that no function can be called with: the text is the answer to it."""


async def _result(awaitable: Awaitable[object]) -> object:
    return await awaitable


def _reply(message: Message, contents: Sequence[Content]) -> ToolReply:
    """The reply to a turn: an answer to each call, malformed ones included, in the order of the calls.
    contents: of the answers to those that can."""
    calls, malformed = message.get("tool_calls") or [], message.get("invalid_tool_calls") or []
    failed = sum(isinstance(content, str) and content.startswith("error: ") for content in contents)
    answers: list[Answer] = [
        {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": content}
        for call, content in zip(calls, contents, strict=True)
    ]
    answers += [
        {"role": "tool", "name": "tool", "tool_call_id": call["id"], "content": f"error: {call['error']}"}
        for call in malformed
    ]
    answers.sort(key=lambda answer: str(answer["tool_call_id"]))
    return answers, 0.0, not answers, {"tool_calls": len(calls), "failed_calls": failed}


def content_of(returned: object) -> Content:
    """Convert a tool's result to a message's content: parts if it has images, else text.

    >>> content_of([1, "two"]), content_of([{"type": "image", "image": b"..."}, "a cat"])
    ('[1, "two"]', [{'type': 'image', 'image': b'...'}, {'type': 'text', 'text': 'a cat'}])
    """
    if isinstance(returned, str):
        return returned
    every = returned if isinstance(returned, list | tuple) else [returned]
    if not any(_is_image(item) for item in every):
        return json.dumps(returned, default=str)
    return [_content_part(item) for item in every]


def _is_image(value: object) -> bool:
    if isinstance(value, dict):
        return value.get("type") == "image" and "image" in value
    return any(base.__module__.startswith("PIL.") for base in type(value).__mro__)


def _content_part(value: object) -> dict[str, object]:
    if _is_image(value):
        return value if isinstance(value, dict) else {"type": "image", "image": value}
    if isinstance(value, dict) and value.get("type") == "text":
        return value
    return {"type": "text", "text": value if isinstance(value, str) else json.dumps(value, default=str)}
