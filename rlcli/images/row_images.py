"""Images of a dataset's rows, and their markers in the messages."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.types import IMAGE, Message


class BadImage(ValueError):
    """An image, or its place in a prompt, that cannot be used; the message says why in one line."""


MAX_FILE_BYTES = 256 << 20
"""Maximum size of an image's file."""


def load_images(value: Any, folder: Path, also: Sequence[Path] = ()) -> tuple[bytes, ...]:
    """The encoded images in a row's value: one or a list of them, or none (None).

    An image is its bytes, the path of its file, or a dict of `bytes` and `path`, as the hub's datasets and verl have
    it. folder: where relative paths begin. A file must lie in it or in one of `also`, with all links followed: rows do
    not choose which other files are read. Raises `BadImage`.
    """
    if value is None:
        return ()
    every = value if isinstance(value, list | tuple) else [value]
    return tuple(_load_image(image, number, (folder, *also)) for number, image in enumerate(every))


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
    """The messages with one marker for each of the `images` images: unchanged, or if they have no marker, with
    all of them at the start of the first user message. Raises `BadImage` if the numbers differ."""
    count = markers(messages)
    if count == images:
        return tuple(messages)
    first = next((index for index, candidate in enumerate(messages) if candidate["role"] == "user"), None)
    if count or first is None:
        present = f"{count} {IMAGE} marker{'s' * (count != 1)}" if count else "no user message to put them in"
        raise BadImage(f"the row has {images} image{'s' * (images != 1)}, and its messages have {present}")
    message = {**messages[first], "content": IMAGE * images + messages[first]["content"]}
    return (*messages[:first], message, *messages[first + 1 :])


def markers(messages: Iterable[Message]) -> int:
    """Number of `IMAGE` markers in the messages."""
    return sum(message["content"].count(IMAGE) for message in messages)


def _load_image(value: Any, number: int, folders: Sequence[Path]) -> bytes:
    path, folder = None, folders[0]
    if isinstance(value, Mapping):
        value, path = value.get("bytes"), value.get("path")
    elif isinstance(value, str):
        value, path = None, value
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(path, str) or not path:
        raise BadImage(f"image {number} has neither bytes nor a path")
    shown = f"{str(folder / path)!a:.200}"
    try:
        file = (folder / path).resolve()
        if not any(file.is_relative_to(root) for allowed in folders for root in _roots(allowed)):
            raise BadImage(
                f"image {number}: {shown} lies outside the data's folder; put it there, or its bytes into the row"
            )
        return _content(file)
    except FileNotFoundError:
        raise BadImage(f"image {number}: no such file: {shown}") from None
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links; a NUL character
        if isinstance(error, BadImage):
            raise
        why = getattr(error, "strerror", None) or error
        raise BadImage(f"image {number}: {shown} cannot be read: {why}") from error


def _roots(folder: Path) -> tuple[Path, ...]:
    """The folder without links. The files of a snapshot in the hub's cache are links to `blobs`, beside its
    snapshots: that folder too."""
    resolved = folder.resolve()
    blobs = resolved.parent.parent / "blobs"
    return (resolved, blobs) if resolved.parent.name == "snapshots" and blobs.is_dir() else (resolved,)


def _content(file: Path) -> bytes:
    """Content of a regular file. Never blocks: a pipe or a device is refused. Raises `OSError`."""
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError
        if status.st_size > MAX_FILE_BYTES:
            raise OSError(f"it has more than {MAX_FILE_BYTES >> 20} MiB")
        return opened.read()


def _part(part: Any) -> str | None:
    if not isinstance(part, Mapping):
        return None
    if part.get("type") == "image":
        return IMAGE
    text = part.get("text")
    return text if part.get("type") == "text" and isinstance(text, str) else None
