"""Messages and long texts of samples, as one text each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlcli.data.sample_files import is_conversation
from rlcli.images.image_descriptions import descriptions, worded_messages
from rlcli.support.redact import printable


def message_text(message: Mapping[str, Any]) -> str:
    """A message of a conversation in one text: its role, its reasoning, its text and its tool calls.

    >>> message_text({"role": "tool", "content": "8"})
    'tool: 8'
    """
    called = message.get("tool_calls")
    calls = [
        call.get("function", call) if isinstance(call, dict) else call
        for call in (called if isinstance(called, list) else ())
    ]
    parts = [message.get("reasoning_content") or "", message.get("content") or "", *calls]
    return f"{message.get('role')}: " + "\n".join(part for part in map(_as_text, parts) if part)


def _as_text(content: object) -> str:
    """Content may be a list of parts in files of others."""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def messages_of(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The messages of a saved sample; empty if it has none, or text that is no list of messages."""
    try:
        messages = json.loads(row.get("messages") or "[]")
    except (ValueError, RecursionError):
        return ()
    valid = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    return messages if valid else ()


def worded_messages_of(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """`messages_of` with images described in words."""
    return worded_messages(messages_of(row), () if is_conversation(row) else descriptions(row.get("images")))


def shortened(text: str, length: int) -> str:
    """The first `length` characters, without control characters, and the number of characters left out.

    >>> shortened("four", 2)
    'fo\\n… 2 characters more'
    """
    left_out = len(text) - length
    return printable(text[:length]) + (f"\n… {left_out} characters more" if left_out > 0 else "")
