"""Chats as datasets store them: messages, conversations of ShareGPT, and the JSON text of either."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlcli.errors import DataError
from rlcli.images.row_images import content_text
from rlcli.types import Message
from rlcli_data_prep.columns import unpacked
from rlcli_data_prep.sources import text_of

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function": "tool",
    "observation": "tool",
    "tool": "tool",
}
"""Names of who speaks, of ShareGPT and others → role."""
HOLDERS = ("messages", "conversations", "conversation")
"""Fields of a struct that hold a chat's messages."""
_STARTS_AS_CHAT = re.compile(r"""\s*\[\s*\{\s*(["'])(?:role|content|from|value)\1\s*:""")


def chat(value: Any, column: str) -> tuple[Message, ...]:
    """The messages of a chat in a column; plain text is one user message.

    Messages have `role` and `content`, or `from` and `value` (ShareGPT); empty system prompts, and an empty turn of the
    assistant at the end, are left out. A struct may hold them as `messages` or `conversations`, or be a struct of
    lists, and all of it may be JSON text. Raises `DataError`.
    """
    value = _listed(_parsed(value, column))
    if not isinstance(value, list) or not value:
        return ({"role": "user", "content": text_of(value, column).strip()},)
    for message in value:
        if not isinstance(message, Mapping):
            raise DataError(f"'{column}' holds no chat message: {message!r:.80}", "give role and content as text")
    if len(value) > 1 and _is_empty(value[-1], "assistant"):
        value = value[:-1]
    messages = tuple(_message(message) for message in value if not _is_empty(message, "system"))
    if not messages:
        raise DataError(f"'{column}' holds no message but an empty system prompt", "fix that row")
    return messages


def without_answer(messages: tuple[Message, ...], column: str) -> tuple[tuple[Message, ...], str]:
    """The chat up to the last turn that is not the assistant's, and the text of the turns after it: with these in the
    prompt the policy would be shown the answer. Raises `DataError` if nothing is left."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise DataError(f"'{column}' holds turns of the assistant alone", "give the user's question too")
    return messages[:end], "\n\n".join(message["content"] for message in messages[end:])


def ends_with_answer(value: Any) -> bool:
    """True if a column's value is a chat that ends with the assistant's turn."""
    value = _listed(unpacked(value))
    if not isinstance(value, list) or not value or not isinstance(value[-1], Mapping):
        return False
    return bool(_role(value[-1]) == "assistant") and not _is_empty(value[-1], "assistant")


def _listed(value: Any) -> Any:
    """The list of messages that a struct holds, is of lists, or is itself; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    held = next((value[name] for name in HOLDERS if isinstance(value.get(name), list | Mapping)), None)
    if held is not None:
        return _listed(held)
    for names in (("role", "content"), ("from", "value")):
        speakers, texts = (value.get(name) for name in names)
        if isinstance(speakers, list) and isinstance(texts, list) and len(speakers) == len(texts):
            return [{names[0]: speaker, names[1]: text} for speaker, text in zip(speakers, texts, strict=True)]
    return [value]


def _parsed(value: Any, column: str) -> Any:
    """The chat that a JSON text holds; any other value as it is."""
    if not isinstance(value, str):
        return value
    parsed = unpacked(value)
    if isinstance(parsed, Mapping):
        return parsed if any(isinstance(parsed.get(name), list) for name in HOLDERS) or _is_message(parsed) else value
    if isinstance(parsed, list):
        return parsed if parsed and all(map(_is_message, parsed)) else value
    if _STARTS_AS_CHAT.match(value) and value.rstrip().endswith("]"):
        raise DataError(
            f"'{column}' holds the text of a chat that is not JSON: {value.strip()!r:.80}",
            "store the messages as a list, or as JSON (json.dumps), not as Python prints them",
        )
    return value


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and ({"role", "content"} <= value.keys() or {"from", "value"} <= value.keys())


def _role(message: Mapping[str, Any]) -> Any:
    role = message.get("role") if message.get("role") is not None else message.get("from")
    return ROLES.get(role.lower(), role) if isinstance(role, str) else role


def _content(message: Mapping[str, Any]) -> Any:
    content = message.get("content")
    return message.get("value") if content is None else content


def _is_empty(message: Any, role: str) -> bool:
    return isinstance(message, Mapping) and _role(message) == role and _content(message) in ("", None)


def _message(message: Mapping[str, Any]) -> Message:
    """Text, or a list of parts as text with `<image>` markers."""
    role, content = _role(message), _content(message)
    if message.get("role") is None and message.get("from") is not None and role not in ROLES.values():
        raise DataError(
            f"'from' is {role!r:.40}, which is no known speaker of a conversation", f"write one of {', '.join(ROLES)}"
        )
    parts = content_text(content) if isinstance(content, list) else None
    return {"role": text_of(role, "role"), "content": parts or text_of(content, "content")}
