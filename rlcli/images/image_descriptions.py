"""Descriptions of images for places that only show text: their sizes, and digests that identify them.

An image is described as `{"digest": …, "width": 84, "height": 84}`, never by its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypedDict

from rlcli.images.decoding import size_of
from rlcli.images.row_images import BadImage
from rlcli.types import IMAGE, image_digest

MOST = 1000
"""Images of one row; a file may claim any number."""
KEPT = 32
"""Images whose description is kept: the samples of a group are described one after the other."""
_DIGEST = re.compile(r"[0-9a-f]{32}")


class ImageDescription(TypedDict):
    """Description of an image."""

    digest: str
    """`image_digest` of its file."""
    width: int | None
    """Pixels of the upright image; None if it is broken."""
    height: int | None
    """As `width`."""


def described(images: Iterable[bytes]) -> list[ImageDescription]:
    """The descriptions of encoded images."""
    facts = map(_facts, images)
    return [ImageDescription(digest=digest, width=width, height=height) for digest, width, height in facts]


def descriptions(value: Any) -> list[dict[str, Any]]:
    """The descriptions in the column `images` of a saved sample, which anyone may have written: what is none is left
    out. Digest, width and height are None if they cannot be used."""
    images = [image for image in value if isinstance(image, Mapping)][:MOST] if isinstance(value, list | tuple) else []
    return [
        {
            "digest": _digest(image.get("digest")),
            "width": _pixels(image.get("width")),
            "height": _pixels(image.get("height")),
        }
        for image in images
    ]


def in_words(image: Mapping[str, Any]) -> str:
    """Placeholder text of an image.

    >>> in_words({"digest": "0f", "width": 84, "height": 56}), in_words({"width": None})
    ('[image 84 x 56]', '[image]')
    """
    width, height = image.get("width"), image.get("height")
    return f"[image {width} x {height}]" if width and height else "[image]"


def worded(text: str, images: Sequence[Mapping[str, Any]]) -> str:
    """The text with each image in words: in place of its marker, or at the end if there are too few.

    >>> worded("<image>Like <image>?", [{"width": 8, "height": 4}])
    '[image 8 x 4]Like <image>?'
    """
    first, *rest = text.split(IMAGE, len(images))
    words = [in_words(image) for image in images]
    shown = first + "".join(word + part for word, part in zip(words, rest, strict=False))
    return shown + "".join(f" {word}" for word in words[len(rest) :])


def worded_last(text: str, images: Sequence[Mapping[str, Any]]) -> str:
    """`worded` for the last message of a prompt, which has the last of the prompt's images."""
    count = min(text.count(IMAGE), len(images))
    return worded(text, images[len(images) - count :]) if count else text


def worded_messages(messages: Sequence[Mapping[str, Any]], prompt_images: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The messages with their images in words. prompt_images: the prompt's, if the messages do not describe their own:
    its messages come first, and so do its markers."""
    every = [descriptions(message.get("images")) for message in messages]
    return [
        {**message, "content": worded(str(message.get("content") or ""), images)} if images else message
        for message, images in zip(messages, every if any(every) else shared_out(messages, prompt_images), strict=True)
    ]


def shared_out(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> list[Sequence[Any]]:
    """For each message the images whose markers it has. Those without a marker, as in a message that was cut, go to
    the last message that has any, else to the first."""
    counts = _counts(messages, len(images))
    last = max((index for index, count in enumerate(counts) if count), default=0)
    if counts:
        counts[last] += len(images) - sum(counts)
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [images[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _counts(messages: Sequence[Mapping[str, Any]], limit: int) -> list[int]:
    counts: list[int] = []
    for message in messages:
        content = message.get("content")
        present = content.count(IMAGE) if isinstance(content, str) else 0
        counts.append(min(present, limit - sum(counts)))
    return counts


@lru_cache(maxsize=KEPT)
def _facts(image: bytes) -> tuple[str, int | None, int | None]:
    try:
        width, height = size_of(image)
    except BadImage:
        return image_digest(image), None, None
    return image_digest(image), width, height


def _digest(value: Any) -> str | None:
    return value if isinstance(value, str) and _DIGEST.fullmatch(value) else None


def _pixels(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 < value < 1 << 31 else None
