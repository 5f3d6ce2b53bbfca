"""Thumbnails for pages: decoded and encoded again here, so that no page contains untrusted bytes."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

from rlcli.images.decoding import decode

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 256
"""Pixels of a thumbnail's longer side, at most."""
LARGE_SIDE = 1024
"""The same of the copy that a click shows."""
QUALITY = 80


def thumbnail(data: bytes, side: int = SIDE) -> bytes:
    """A copy of an encoded image as PNG or JPEG, whichever is shorter, without metadata; its longer side has at most
    `side` pixels. Raises `BadImage` like `decode`."""
    return small_copy(decode(data), side)


def small_copy(image: Image, side: int = SIDE) -> bytes:
    """The same of a decoded image, which is reduced in its place."""
    from PIL.Image import Resampling

    image.thumbnail((side, side), Resampling.LANCZOS)
    image.info = {}  # a colour profile or a comment would be written too
    return min(_encoded(image, "PNG"), _encoded(image, "JPEG"), key=len)


def data_url(encoded: bytes) -> str:
    """Data URL of an image that `thumbnail` returned, for the `src` of an `img`.

    >>> data_url(b"\\x89PNG")
    'data:image/png;base64,iVBORw=='
    """
    kind = "png" if encoded.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(encoded).decode()}"


def _encoded(image: Image, form: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **({"quality": QUALITY} if form == "JPEG" else {}))
    return buffer.getvalue()
