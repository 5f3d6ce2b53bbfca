"""Thumbnails are small, and made here: nothing of the original bytes is in them."""

from __future__ import annotations

import io

import pytest
from PIL import Image, PngImagePlugin

from rlcli.images.row_images import BadImage
from rlcli.images.thumbnails import data_url, thumbnail
from tests.image_runs import drawing, noise


@pytest.mark.parametrize(
    ("size", "expected"),
    [((84, 56), (84, 56)), ((512, 256), (256, 128)), ((100, 900), (28, 256)), ((2000, 10), (256, 1))],
)
def test_the_longer_side_is_bounded_and_never_stretched(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert Image.open(io.BytesIO(thumbnail(drawing(1, size)))).size == expected


def test_a_drawing_stays_exact_and_a_photo_short() -> None:
    line_art, photo = drawing(1), noise(1, (1024, 1024), "JPEG")
    shown = thumbnail(line_art)
    assert data_url(shown).startswith("data:image/png;base64,")
    assert list(Image.open(io.BytesIO(shown)).getdata()) == list(Image.open(io.BytesIO(line_art)).getdata())
    assert data_url(thumbnail(photo)).startswith("data:image/jpeg;base64,")
    assert len(thumbnail(photo)) < 100_000


def test_nothing_of_the_original_bytes_is_kept() -> None:
    secret, facts, buffer = b"<script>secret()</script>", PngImagePlugin.PngInfo(), io.BytesIO()
    facts.add_text("Comment", secret.decode())
    facts.add(b"eXIf", b"MM\x00*" + secret)
    Image.new("RGB", (600, 600), "red").save(buffer, "PNG", pnginfo=facts, icc_profile=secret * 9)
    image = buffer.getvalue() + secret
    shown = thumbnail(image)
    assert image.count(secret) == 2
    assert b"iCCP" in image
    assert not any(name in shown for name in (b"script", b"iCCP", b"eXIf", b"tEXt"))
    jpeg = io.BytesIO()
    Image.new("RGB", (600, 600), "red").save(jpeg, "JPEG", comment=secret, exif=b"Exif\x00\x00MM\x00*" + secret)
    assert b"script" in jpeg.getvalue()
    assert b"script" not in thumbnail(jpeg.getvalue())


@pytest.mark.parametrize("data", [b"", b"no image", noise(1)[:400]], ids=["empty", "text", "truncated"])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(BadImage):
        thumbnail(data)
