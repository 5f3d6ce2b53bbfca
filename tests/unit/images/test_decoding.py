"""Images that are decoded, and those that are refused."""

from __future__ import annotations

import io
import struct
import tracemalloc
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from rlcli.images.decoding import MAX_PIXELS, decode, size_of
from rlcli.images.row_images import BadImage

RED, BLUE = (255, 0, 0), (0, 0, 255)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def red_image(width: int = 6, height: int = 4, mode: str = "RGB") -> Image.Image:
    """Red, with the left upper pixel's quarter in blue."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (0, 0, width // 2, height // 2))
    return image.convert(mode)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, pixels: bytes = b"", *chunks: bytes, depth: int = 1) -> bytes:
    """A greyscale PNG by hand."""
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    body = (chunk(b"IHDR", header), *chunks, chunk(b"IDAT", zlib.compress(pixels)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF", "GIF"])
def test_an_image_of_each_kind_is_decoded(kind: str) -> None:
    data = encoded(red_image(), kind, **({"lossless": True} if kind == "WEBP" else {}))
    image = decode(data)
    assert (image.mode, image.size, size_of(data)) == ("RGB", (6, 4), (6, 4))
    assert np.array_equal(np.asarray(image), np.asarray(red_image()))


def test_a_jpeg_is_decoded_in_colour_grey_and_cmyk() -> None:
    for mode in ("RGB", "L", "CMYK"):
        image = decode(encoded(Image.new("RGB", (16, 16), RED).convert(mode), "JPEG", quality=95))
        expected = (76, 76, 76) if mode == "L" else RED
        assert image.mode == "RGB"
        assert np.abs(np.asarray(image, int) - expected).max() <= 3


def test_a_16_bit_greyscale_is_scaled_and_not_clipped() -> None:
    levels = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    for kind in ("PNG", "TIFF"):
        pixels = np.asarray(decode(encoded(Image.fromarray(levels), kind)))
        assert pixels[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_transparent_pixels_are_white() -> None:
    clear = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    clear.putpixel((0, 0), (255, 0, 0, 255))
    assert [decode(encoded(clear)).getpixel((x, 0)) for x in (0, 1)] == [RED, (255, 255, 255)]
    assert decode(encoded(Image.new("LA", (1, 1), (0, 0)))).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([0, 255, 0, 255, 0, 0])
    palette.putpixel((0, 0), 1)
    for kind in ("PNG", "GIF"):
        image = decode(encoded(palette, kind, transparency=0))
        assert [image.getpixel((x, 0)) for x in (0, 1)] == [RED, (255, 255, 255)]
    grey = decode(encoded(Image.new("L", (1, 1), 7), transparency=7))
    assert grey.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_the_orientation_in_the_metadata_is_applied(kind: str, orientation: int) -> None:
    upright = red_image(32, 16)
    undo = {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270, 3: Image.Transpose.ROTATE_180}
    undo |= {2: Image.Transpose.FLIP_LEFT_RIGHT, 4: Image.Transpose.FLIP_TOP_BOTTOM}
    undo |= {5: Image.Transpose.TRANSPOSE, 7: Image.Transpose.TRANSVERSE}
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = upright.transpose(undo[orientation]) if orientation > 1 else upright
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}}.get(kind, {})
    data = encoded(stored, kind, exif=exif, **options)
    assert size_of(data) == (32, 16)
    pixels = np.asarray(decode(data), int)
    assert pixels.shape == (16, 32, 3)
    assert np.abs(pixels - np.asarray(upright, int)).max() <= (4 if kind == "JPEG" else 0)


def test_broken_metadata_leaves_the_image_as_it_is() -> None:
    data = encoded(red_image(8, 16), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\x01\x12" * 9)
    assert (size_of(data), decode(data).size) == ((8, 16), (8, 16))


def frames(kind: str) -> bytes:
    other = Image.new("RGB", (6, 4), BLUE)
    return encoded(red_image(), kind, save_all=True, append_images=[other], duration=50)


def webp(width: int, height: int) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF\x20\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + size + bytes(20)


REFUSED = {
    "empty": (b"", "is empty"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is none of PNG, JPEG"),
    "another format": (encoded(red_image(), "PPM"), "is none of PNG, JPEG"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is none of PNG, JPEG"),
    "a header alone": (b"\x89PNG\r\n\x1a\n", "is none of PNG, JPEG"),
    "bomb": (png(100_000, 100_000, bytes(1000)), f"has more than {MAX_PIXELS} pixels"),
    "large": (png(8193, 8193, bytes(1000)), "has 8193 x 8193 pixels, more than"),
    "large enough for a warning of PIL": (png(10_000, 10_000), "has 10000 x 10000 pixels, more than"),
    "large WebP": (webp(16_000, 16_000), "has 16000 x 16000 pixels, more than"),
    "thin": (png(201, 1, bytes(27)), "one side more than 200 times the other"),
    "no height": (png(4, 0), "is none of|is broken|has 4 x 0 pixels"),
    "GIF of frames": (frames("GIF"), r"\(GIF\) has more than one frame"),
    "APNG": (frames("PNG"), r"\(PNG\) has more than one frame"),
    "WebP of frames": (frames("WEBP"), r"\(WEBP\) has more than one frame"),
    "TIFF of pages": (frames("TIFF"), r"\(TIFF\) has more than one frame"),
    "float": (encoded(Image.new("F", (2, 2)), "TIFF"), "32 bits a channel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_image_is_refused_by_its_header(name: str) -> None:
    data, why = REFUSED[name]
    with pytest.raises(BadImage, match=why) as raised:
        decode(data)
    assert "\n" not in str(raised.value)
    with pytest.raises(BadImage, match=why):
        size_of(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
def test_a_truncated_image_is_refused(kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    with pytest.raises(BadImage, match=r"is broken|is none of"):
        decode(data[: len(data) * 2 // 3])


def test_pixels_that_are_no_data_are_refused() -> None:
    with pytest.raises(BadImage, match="is broken"):
        decode(png(64, 64, b"x" * 10))
    assert size_of(png(64, 64, b"x" * 10)) == (64, 64)


def test_neither_function_prints_a_warning_nor_changes_settings_of_pil() -> None:
    settings = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for data, _ in REFUSED.values():
            with pytest.raises(BadImage):
                decode(data)
    assert not caught
    assert settings == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


def test_a_header_is_read_without_the_pixels() -> None:
    data = png(8192, 8192, bytes(1025 * 8192))  # 64 megapixels of one bit
    tracemalloc.start()
    try:
        assert size_of(data) == (8192, 8192)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


SEEDS = [encoded(red_image(), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")]


@settings(max_examples=300, deadline=None)
@given(seed=st.sampled_from(SEEDS), changes=st.dictionaries(st.integers(0, 10**4), st.integers(0, 255), max_size=6))
def test_changed_bytes_give_an_image_or_a_refusal(seed: bytes, changes: dict[int, int]) -> None:
    data = bytearray(seed)
    for offset, byte in changes.items():
        data[offset % len(data)] = byte
    try:
        image = decode(bytes(data))
    except BadImage:
        return
    assert (image.mode, image.size) == ("RGB", size_of(bytes(data)))
