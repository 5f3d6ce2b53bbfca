"""Parsing of a turn of the policy into a message: reasoning, text, and tool calls."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlcli.environments.chat_messages import InvalidToolCall, Message, ToolCall, ToolSchema
from rlcli.environments.tools import WrongArgument, argument_of
from rlcli.errors import ConfigError
from rlcli.support.json_types import JsonValue

NAME_CHARS = 256
"""Maximum length of the name of a tool or of a parameter in XML."""
SHOWN_CHARS = 500
"""Maximum length of the text of a malformed call that its message keeps."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool."""

    name: str
    """Name of the tool."""
    arguments: Mapping[str, JsonValue]
    """Value of each parameter."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A call that cannot be read."""

    text: str
    """Text that the policy wrote."""
    error: str
    """The reason, and the form that a call has."""


class Parsed(NamedTuple):
    """A turn of the policy."""

    message: Message
    """The turn as a message."""
    failed: int
    """Number of calls that cannot be read, which are in its `invalid_tool_calls`."""


Calls = Sequence[Call | MalformedCall]
"""The calls of a turn, in the order in which they were written."""

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def _hermes(text: str) -> tuple[str, Calls]:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`: Qwen2.5, Qwen3, Hermes."""
    return _BLOCK.sub("", text), [call for block in _BLOCK.findall(text) for call in _of_json(block, "arguments")]


def _xml(text: str) -> tuple[str, Calls]:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.
    Values have no types: they are texts, until `typed` reads them by the schema."""
    calls: list[Call | MalformedCall] = []
    for block in _BLOCK.findall(text):
        functions = _elements(block, "function")
        if not functions:
            form = "<function=NAME><parameter=KEY>VALUE</parameter></function>"
            calls.append(MalformedCall(block, f"the call cannot be read: it is not {form}"))
        for name, body in functions:
            values = {key: value.removeprefix("\n").removesuffix("\n") for key, value in _elements(body, "parameter")}
            calls.append(Call(name, values))
    return _BLOCK.sub("", text), calls


def _elements(text: str, tag: str) -> list[tuple[str, str]]:
    """Name and content of each `<tag=NAME>…</tag>`, in time linear in the text, which a model wrote.

    >>> _elements("<a=x>1</a><a=two words>2</a><a=y>3", "a")
    [('x', '1')]
    """
    opening, closing = f"<{tag}=", f"</{tag}>"
    elements: list[tuple[str, str]] = []
    end = 0
    while (start := text.find(opening, end)) >= 0:
        begin = start + len(opening)
        name_end = text.find(">", begin, begin + NAME_CHARS)
        name = text[begin : max(begin, name_end)]
        if not name or any(map(str.isspace, name)):
            end = begin
            continue
        content_end = text.find(closing, name_end)
        if content_end < 0:
            break
        elements.append((name, text[name_end + 1 : content_end]))
        end = content_end + len(closing)
    return elements


def _llama(text: str) -> tuple[str, Calls]:
    """The whole turn is `{"name": …, "parameters": …}`, or a list of these: Llama 3.1 and later."""
    body = text.removeprefix("<|python_tag|>").strip()
    if re.match(r"\{|\[\s*\{\s*\"name\"", body) is None:
        return text, []
    calls = _of_json(body, "parameters")
    return ("" if any(isinstance(call, Call) for call in calls) else text), calls


FORMATS: dict[str, Callable[[str], tuple[str, Calls]]] = {"hermes": _hermes, "xml": _xml, "llama": _llama}


def format_of(chat_template: str) -> str:
    """The format that a chat template describes to the model; empty if it has none that is known here."""
    if "<function=" in chat_template:
        return "xml"
    if "<tool_call>" in chat_template:
        return "hermes"
    return "llama" if '"parameters"' in chat_template and "ipython" in chat_template else ""


def parse(text: str, form: str, *, thinking: bool = False, tools: Sequence[ToolSchema] = ()) -> Parsed:
    """Parse a turn of the policy into a message. form: one of FORMATS; empty: no calls. thinking: the prompt ends in
    an open <think>. tools: the JSON schemas of the tools, by which values without a type are read. Text within the
    reasoning that looks like a call is none. Raises `ConfigError` for an unknown form."""
    if form and form not in FORMATS:
        raise ConfigError(f"'{form}' is no format of tool calls", f"give one of {', '.join(FORMATS)}")
    reasoning, content = _split(text, thinking)
    content, calls = FORMATS[form](content) if form else (content, ())
    tool_calls: list[ToolCall] = []
    malformed: list[InvalidToolCall] = []
    for index, call in enumerate(calls, 1):
        number = f"call{index:05}"
        if isinstance(call, MalformedCall):
            malformed.append({"id": number, "text": call.text.strip()[:SHOWN_CHARS], "error": call.error})
            continue
        arguments = typed(call, tools) if form == "xml" else call.arguments
        tool_calls.append({"id": number, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    message: Message = {"role": "assistant", "content": content.strip() if tool_calls else content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = tool_calls
    if malformed:
        message["invalid_tool_calls"] = malformed
    return Parsed(message, len(malformed))


def typed(call: Call, tools: Sequence[ToolSchema]) -> Mapping[str, JsonValue]:
    """The arguments of a call whose values are texts, each as the tool's schema says. A text that is no such value
    stays as it is, as does one of an unknown tool or parameter.

    >>> schema = {"properties": {"code": {"type": "string"}, "count": {"type": "integer"}}}
    >>> typed(Call("f", {"code": "007", "count": "7"}), [{"function": {"name": "f", "parameters": schema}}])
    {'code': '007', 'count': 7}
    """
    schemas = _properties(call.name, tools)
    arguments = dict(call.arguments)
    for name, value in arguments.items():
        schema = schemas.get(name)
        if isinstance(schema, Mapping):
            with contextlib.suppress(WrongArgument, RecursionError):
                arguments[name] = cleaned(argument_of(value, schema))
    return arguments


def _properties(name: str, tools: Sequence[ToolSchema]) -> Mapping[str, JsonValue]:
    """The schemas of a tool's parameters, by name; empty if the tools do not describe it."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            return properties_of(function)
    return {}


def function_of(tool: ToolSchema) -> Mapping[str, JsonValue]:
    """The function that a schema describes; also of a schema that is only the function's own part.

    >>> function_of({"type": "function", "function": {"name": "add"}}), function_of({"name": "add"})
    ({'name': 'add'}, {'name': 'add'})
    """
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def properties_of(function: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """The schemas of a function's parameters, by name; empty if it describes none."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _split(text: str, thinking: bool) -> tuple[str | None, str]:
    begins = text.lstrip().startswith("<think>")
    if not thinking and not begins:
        return None, text
    reasoning, closed, content = text.partition("</think>")
    reasoning = reasoning.lstrip().removeprefix("<think>")
    return (reasoning.strip(), content.lstrip("\n")) if closed else (reasoning.strip(), "")


def _of_json(text: str, key: str) -> Calls:
    """The calls in a JSON object with `name` and `key`, or in a list of these; at least one."""
    form = f'{{"name": …, "{key}": {{…}}}}'
    try:
        value = cleaned(json.loads(text))
    except json.JSONDecodeError as error:
        reason = f"it is not JSON: {error.msg} (character {error.pos + 1})"
        return [MalformedCall(text, f"the call cannot be read: {reason}")]
    except (ValueError, RecursionError):
        return [MalformedCall(text, f"the call cannot be read: it is not JSON of the form {form}")]
    if isinstance(value, list):
        return [_call_of(text, item, key, form) for item in value] or [MalformedCall(text, "the list has no call")]
    return [_call_of(text, value, key, form)]


def _call_of(text: str, value: JsonValue, key: str, form: str) -> Call | MalformedCall:
    """One call. Its arguments may be JSON text, as OpenAI's interface writes them."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str):
        return MalformedCall(text, f"the call cannot be read: it is not of the form {form}")
    arguments = value.get(key, {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = cleaned(json.loads(arguments))
    if not isinstance(arguments, dict):
        return MalformedCall(text, f"the call of {name:.60} cannot be read: {key} is not a JSON object")
    return Call(name, arguments)


def cleaned(value: JsonValue) -> JsonValue:
    """A value of JSON without halves of surrogate pairs, which no file and no tokenizer takes. Raises `RecursionError`
    for one that is nested too deeply.

    >>> cleaned({"a": ["x\\ud83dy", 1]})
    {'a': ['x\ufffdy', 1]}
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {str(cleaned(key)): cleaned(item) for key, item in value.items()}
    return [cleaned(item) for item in value] if isinstance(value, list) else value
