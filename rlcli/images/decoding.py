"""Decode untrusted images: formats, sizes and memory are bounded, and errors name the reason."""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING, Any

from rlcli.images.row_images import BadImage

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 64 * 2**20
MAX_RATIO = 200
"""The longer side divided by the shorter one; Qwen's processor refuses more."""
_ORIENTATION = 0x0112
# EXIF orientation → the transposition that undoes it, as `PIL.Image.Transpose` names it.
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
_QUIET = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


def decode(data: bytes) -> Image:
    """The image in RGB, upright, on white where it is transparent. It needs at most about 16 bytes a pixel.

    Raises `BadImage` for what is no image of `FORMATS`, is broken or truncated, is animated, or has too many pixels
    (`MAX_PIXELS`) or too thin a shape (`MAX_RATIO`).
    """
    image = _opened(data)
    transposition = _UPRIGHT.get(_orientation(image))
    try:
        image.load()
        rgb = _rgb(image)
        return rgb.transpose(_transposition(transposition)) if transposition else rgb
    except Exception as error:  # decoders raise errors of many types at bytes that are not as they should be
        raise _bad(error) from error


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height of the upright image, from its header alone. Raises `BadImage` like `decode`, except for
    what only the pixels show."""
    image = _opened(data)
    width, height = image.size
    return (height, width) if _orientation(image) >= 5 else (width, height)


def decoded_size(data: bytes) -> tuple[int, int]:
    """As `size_of`, once the image is decoded. Raises `BadImage` like `decode`."""
    size: tuple[int, int] = decode(data).size
    return size


def _opened(data: bytes) -> Any:
    """Open the image, with its header read and checked."""
    from PIL import Image

    if not data:
        raise BadImage("the image is empty")
    if _QUIET not in warnings.filters:
        warnings.filterwarnings("ignore", module=r"PIL\.")  # no context manager: several threads may decode
    _check_size(*(_webp_size(data) or (1, 1)))
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        moves = image.format in ("GIF", "PNG", "WEBP", "TIFF") and getattr(image, "is_animated", False)
    except Image.UnidentifiedImageError:
        raise BadImage(f"the image is none of {', '.join(FORMATS)}, or its header is broken") from None
    except Image.DecompressionBombError:
        raise BadImage(f"the image has more than {MAX_PIXELS} pixels") from None
    except Exception as error:
        raise _bad(error) from error
    _check_size(*image.size)
    if moves:
        raise BadImage(f"the image ({image.format}) has more than one frame")
    if image.mode in ("I", "F"):
        raise BadImage("the image has 32 bits a channel")
    return image


def _check_size(width: int, height: int) -> None:
    if min(width, height) < 1:
        raise BadImage(f"the image has {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise BadImage(f"the image has {width} x {height} pixels, more than {MAX_PIXELS}")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise BadImage(f"the image has {width} x {height} pixels, one side more than {MAX_RATIO} times the other")


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """The size in a WebP's header. PIL's plugin already reserves the pixels when it opens one."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF


def _orientation(image: Any) -> int:
    """The EXIF orientation: 1 is upright, from 5 on the sides are exchanged."""
    from PIL import Image

    stored = image.info.get("exif")
    if not stored or image.format == "TIFF":  # PIL turns a TIFF upright itself
        return 1
    exif = Image.Exif()
    try:
        exif.load(stored)
        orientation = exif.get(_ORIENTATION, 1)
    except Exception:  # broken metadata leaves the pixels as they are
        return 1
    return orientation if orientation in _UPRIGHT else 1


def _transposition(name: str) -> Any:
    from PIL import Image

    return Image.Transpose[name]


def _rgb(image: Any) -> Image:
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    canvas = Image.new("RGB", image.size, "white")
    canvas.paste(image, mask=image.getchannel("A"))
    return canvas


def _bad(error: Exception) -> BadImage:
    return BadImage(f"the image is broken: {' '.join(str(error).split()) or type(error).__name__:.120}")
