"""Pictures and their places in the messages, as the rows of a dataset hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.types import IMAGE, Message


class BadImage(ValueError):
    """A picture, or its place in a prompt, that cannot be used; the message says why in one line."""


def pictures(value: Any, folder: Path) -> tuple[bytes, ...]:
    """The encoded pictures in a row's value: one or a list of them, or none (None).

    A picture is its bytes, the path of its file, or a dict of `bytes` and `path`, as the hub's datasets and verl have
    it. folder: where relative paths begin. Raises `BadImage`.
    """
    if value is None:
        return ()
    every = value if isinstance(value, list | tuple) else [value]
    return tuple(_picture(one, number, folder) for number, one in enumerate(every))


def content_text(content: Any) -> str | None:
    """A message's content as text: a list of parts as the hub's datasets have it becomes text with `IMAGE` markers.
    None if it is neither.

    >>> content_text([{"type": "image", "text": None}, {"type": "text", "text": "How many?"}])
    '<image>How many?'
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        return None
    texts = [_part(part) for part in content]
    return None if None in texts else "".join(text or "" for text in texts)


def content_parts(content: str) -> list[dict[str, str | None]]:
    """The inverse of `content_text`.

    >>> content_parts("<image>How many?")
    [{'type': 'image', 'text': None}, {'type': 'text', 'text': 'How many?'}]
    """
    parts: list[dict[str, str | None]] = []
    for number, text in enumerate(content.split(IMAGE)):
        parts += [{"type": "image", "text": None}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def marked(messages: Sequence[Message], images: int) -> tuple[Message, ...]:
    """The messages with one marker for each of so many images: as they are, or without any marker with all of them at
    the start of the first user message. Raises `BadImage` if the numbers differ."""
    found = markers(messages)
    if found == images:
        return tuple(messages)
    first = next((place for place, one in enumerate(messages) if one["role"] == "user"), None)
    if found or first is None:
        there = f"{found} {IMAGE} marker{'s' * (found != 1)}" if found else "no user message to put them in"
        raise BadImage(f"the row has {images} image{'s' * (images != 1)}, and its messages have {there}")
    message = {**messages[first], "content": IMAGE * images + messages[first]["content"]}
    return (*messages[:first], message, *messages[first + 1 :])


def markers(messages: Iterable[Message]) -> int:
    """How many `IMAGE` markers the messages have."""
    return sum(message["content"].count(IMAGE) for message in messages)


def _picture(value: Any, number: int, folder: Path) -> bytes:
    path = None
    if isinstance(value, Mapping):
        value, path = value.get("bytes"), value.get("path")
    elif isinstance(value, str):
        value, path = None, value
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(path, str) or not path:
        raise BadImage(f"image {number} has neither bytes nor a path")
    file = folder / path
    shown = f"{str(file)!a:.200}"
    try:
        if not file.is_file():  # never a device or a pipe
            raise BadImage(f"image {number}: no such file: {shown}")
        return file.read_bytes()
    except OSError as error:
        raise BadImage(f"image {number}: {shown} cannot be read: {error.strerror or error}") from error


def _part(part: Any) -> str | None:
    if not isinstance(part, Mapping):
        return None
    if part.get("type") == "image":
        return IMAGE
    text = part.get("text")
    return text if part.get("type") == "text" and isinstance(text, str) else None
