"""What the policy drew, as a message: its reasoning, its text, and its calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from rlcli.errors import ConfigError

Call = tuple[str, dict[str, Any]]
"""The name of a tool, and its arguments."""


class Parsed(NamedTuple):
    """message: as a chat template takes it. failed: calls that could not be read."""

    message: dict[str, Any]
    failed: int


def _hermes(text: str) -> tuple[str, list[Call], int]:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`: Qwen2.5, Qwen3, Hermes."""
    calls, failed = [], 0
    for found in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        call = _of_json(found, "arguments")
        calls += [call] if call else []
        failed += call is None
    return re.sub(r"<tool_call>.*?(?:</tool_call>|\Z)", "", text, flags=re.DOTALL), calls, failed


def _xml(text: str) -> tuple[str, list[Call], int]:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5."""
    calls: list[Call] = []
    failed = 0
    for found in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        function = re.search(r"<function=([^>\s]+)>(.*?)</function>", found, re.DOTALL)
        if function is None:
            failed += 1
            continue
        given = re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", function[2], re.DOTALL)
        calls.append((function[1], {name: _value(value) for name, value in given}))
    return re.sub(r"<tool_call>.*?(?:</tool_call>|\Z)", "", text, flags=re.DOTALL), calls, failed


def _llama(text: str) -> tuple[str, list[Call], int]:
    """The whole turn is `{"name": …, "parameters": …}`: Llama 3.1 and later."""
    body = text.removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return text, [], 0
    call = _of_json(body, "parameters")
    return ("", [call], 0) if call else (text, [], 1)


FORMATS: dict[str, Callable[[str], tuple[str, list[Call], int]]] = {"hermes": _hermes, "xml": _xml, "llama": _llama}


def format_of(chat_template: str) -> str:
    """The format that a chat template describes to the model; empty if it has none that is known here."""
    if "<function=" in chat_template:
        return "xml"
    if "<tool_call>" in chat_template:
        return "hermes"
    return "llama" if '"parameters"' in chat_template and "ipython" in chat_template else ""


def parse(text: str, form: str, *, opened: bool = False) -> Parsed:
    """The message that the policy drew. form: one of FORMATS; empty: no calls. opened: the prompt has opened a
    <think>. Calls within the reasoning are none. Raises `ConfigError` for an unknown form."""
    if form and form not in FORMATS:
        raise ConfigError(f"'{form}' is no format of tool calls", f"give one of {', '.join(FORMATS)}")
    reasoning, content = _split(text, opened)
    content, calls, failed = FORMATS[form](content) if form else (content, [], 0)
    message: dict[str, Any] = {"role": "assistant", "content": content.strip() if calls else content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call{place:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(calls, 1)
        ]
    return Parsed(message, failed)


def _split(text: str, opened: bool) -> tuple[str | None, str]:
    begins = text.lstrip().startswith("<think>")
    if not opened and not begins:
        return None, text
    reasoning, closed, content = text.partition("</think>")
    reasoning = reasoning.lstrip().removeprefix("<think>")
    return (reasoning.strip(), content.lstrip("\n")) if closed else (reasoning.strip(), "")


def _of_json(text: str, key: str) -> Call | None:
    try:
        found = cleaned(json.loads(text))
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get(key, {})
    return (found["name"], arguments) if isinstance(arguments, dict) else None


def cleaned(value: Any) -> Any:
    """A value of JSON without halves of surrogate pairs, which no file and no tokenizer takes. Raises `RecursionError`
    for one that is nested too deeply.

    >>> cleaned({"a": ["x\\ud83dy", 1]})
    {'a': ['x\ufffdy', 1]}
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {cleaned(key): cleaned(item) for key, item in value.items()}
    return [cleaned(item) for item in value] if isinstance(value, list) else value


def _value(text: str) -> Any:
    """A parameter as JSON, or as the text that it is."""
    try:
        return cleaned(json.loads(text))
    except (ValueError, RecursionError):
        return text
