"""Many images take bounded memory: encoded ones are mapped from a file, and one at a time is decoded."""

from __future__ import annotations

import gc
import io
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlcli.data.prompts import image_columns, prompt_table, tokenized_prompts
from rlcli.data.prompts.parquet_schema import IMAGE_ROWS, image_column, write_prompts
from rlcli.data.prompts.prompt_table import PromptTable, read_prompts
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.errors import DataError
from rlcli.images import decoding
from rlcli.images.families import KINDS
from rlcli.model.io.tiny_vision import image_rule, vision_config, vision_model, vision_tokenizer
from rlcli.types import Prompt

COUNT, SIDE = 100, 96


def png(number: int) -> bytes:
    noise = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
    held = io.BytesIO()
    Image.fromarray(noise).save(held, "PNG")
    return held.getvalue()


def prompt(number: int) -> Prompt:
    messages = ({"role": "user", "content": f"<image>number {number}?"},)
    return Prompt(f"toy:train:{number}", messages, "toy", "", "exact", str(number), {}, (png(number),))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("images") / "train.parquet"
    write_prompts(file, map(prompt, range(COUNT)))
    return file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prompt_table, "MAPPED_FROM", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rlcli" / "pictures"


def allocated(file: Path) -> tuple[PromptTable, int]:
    """The rows, and the bytes of Arrow's memory that they keep."""
    gc.collect()
    bytes_before = pa.total_allocated_bytes()
    rows = read_prompts(file, "train")
    gc.collect()
    return rows, pa.total_allocated_bytes() - bytes_before


@pytest.mark.long
def test_images_are_mapped_from_a_file_that_leaves_nothing(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = sum(len(png(number)) for number in range(COUNT))
    mapped, mapped_bytes = allocated(data)
    assert mapped_bytes < encoded / 50
    assert list(cache.iterdir()) == [], "the file has no name"
    monkeypatch.setattr(prompt_table, "MAPPED_FROM", 1 << 40)
    held, held_bytes = allocated(data)
    assert held_bytes > encoded
    assert list(mapped) == list(held)
    assert [prompt.images for prompt in mapped] == [(png(number),) for number in range(COUNT)]


def test_without_room_for_the_file_images_are_kept_in_memory(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image_columns.tempfile, "NamedTemporaryFile", full)
    assert len(read_prompts(data, "train")) == COUNT
    assert read_prompts(data, "train")[7].images == (png(7),)


def test_row_groups_are_small_and_an_image_is_not_copied_to_write_it(data: Path) -> None:
    assert pq.read_metadata(data).row_group(0).num_rows == IMAGE_ROWS
    bytes_before, image = pa.total_allocated_bytes(), bytes(1 << 20)
    column = image_column([[image], [image, b"x"], [], [b""]])
    assert pa.total_allocated_bytes() - bytes_before < 1.1 * len(image)  # the second row's two are one buffer
    images = [[item["bytes"] for item in row] for row in column.to_pylist()]
    assert images == [[image], [image, b"x"], [], [b""]]


def test_one_image_at_a_time_is_decoded(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the driver decodes to tokenize, and of the encoded images that it holds as bytes."""
    decode, live, counters = decoding.decode, [0], [0, 0]
    opened = PromptTable._images

    def counted(encoded: bytes) -> Image.Image:
        image = decode(encoded)
        live[0] += 1
        weakref.finalize(image, lambda: live.__setitem__(0, live[0] - 1))
        counters[0] = max(counters[0], live[0])
        return image

    def noted(self: PromptTable, value: Any) -> Any:
        counters[1] += 1
        return opened(self, value)

    monkeypatch.setattr(decoding, "decode", counted)
    monkeypatch.setattr(PromptTable, "_images", noted)
    config = vision_model().config
    rule = image_rule(config)
    rows = read_prompts(data, "train")
    chunks: list[int] = []
    encode = tokenized_prompts._encode_some
    monkeypatch.setattr(
        tokenized_prompts,
        "_encode_some",
        lambda *arguments: chunks.append(len(arguments[-1])) or encode(*arguments),  # type: ignore[func-returns-value]
    )
    tokenized = TokenizedPrompts.tokenize(rows, vision_tokenizer(), 10_000, rule=rule)
    assert len(tokenized) == COUNT
    assert counters[0] <= 2
    assert max(chunks) == tokenized_prompts.IMAGE_ROWS_AT_ONCE
    assert counters[1] == 2 * COUNT, "each row is read once to check it, and once to tokenize it"


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_spells_the_token_of_an_image_is_left_out(kind: str) -> None:
    """It would stand for an image that is not there, or take the place of one that is."""
    tokenizer, rule = vision_tokenizer(kind), image_rule(vision_config(kind))
    (spelled, *_) = tokenizer.convert_ids_to_tokens(list(rule.never))

    def row(number: int, text: str, *images: bytes) -> Prompt:
        return Prompt(f"row:{number}", ({"role": "user", "content": text},), "", "", "", "", images=images)

    rows = [row(0, "plain"), row(1, f"see {spelled}"), row(2, f"<image>{spelled}", png(0)), row(3, "<image>", png(1))]
    tokenized = TokenizedPrompts.tokenize(rows, tokenizer, max_prompt_tokens=4000, rule=rule)
    assert [prompt.id for prompt in tokenized.prompts] == ["row:0", "row:3"]
    assert tokenized.bad_images == 2
    with pytest.raises(DataError, match="their texts have tokens that stand for images"):
        TokenizedPrompts.tokenize(rows[1:2], tokenizer, max_prompt_tokens=4000, rule=rule)
