"""Rows of parquet files with images."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcli.data.prompts.parquet_schema import row, write_prompts
from rlcli.data.prompts.prompt_table import JoinedPrompts, PromptTable, read_prompts
from rlcli.data.prompts.token_cache import content_of
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.errors import DataError
from rlcli.images.row_images import content_parts, content_text
from rlcli.model.io.tiny_model import tiny_tokenizer
from rlcli.types import Prompt

A, B = b"\x89PNG one", b"\xff\xd8 two"


def prompt(number: int, text: str, *images: bytes) -> Prompt:
    return Prompt(
        id=f"toy:train:{number}",
        messages=({"role": "system", "content": "Look."}, {"role": "user", "content": text}),
        data_source="toy",
        ability="vision",
        verifier="exact",
        ground_truth="2",
        extra_info={"index": number},
        images=images,
    )


MIXED = [
    prompt(0, "<image>count", A),
    prompt(1, "<image> or <image>?", B, A),
    prompt(2, "1+1="),
    prompt(3, "<image>", B),
]


def plain(text: str = "<image>count") -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return row(data_source="toy", messages=messages, verifier="exact", ground_truth="2", extra_info={"a": 1})


def stored(path: Path, column: str, values: list[Any], kind: Any, texts: list[Any] | None = None) -> PromptTable:
    """A file with a column of images as others write it, read."""
    rows = [plain(text) if isinstance(text, str) else plain() | {"prompt": text} for text in texts or ["<image>"]]
    table = pa.Table.from_pylist(rows).append_column(column, pa.array(values, type=kind))
    pq.write_table(table, path / "train.parquet")
    return read_prompts(path, "train")


STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def test_prompts_with_images_come_back_as_written(tmp_path: Path) -> None:
    write_prompts(tmp_path / "train.parquet", MIXED)
    table = read_prompts(tmp_path, "train")
    assert list(table) == MIXED
    assert table[1].images == (B, A)
    assert list(table.take([1, 3])) == [MIXED[1], MIXED[3]]
    assert list(pickle.loads(pickle.dumps(table[1:3]))) == MIXED[1:3]
    assert pq.read_schema(tmp_path / "train.parquet").field("images").type == pa.list_(STRUCT)


def test_the_column_is_written_only_for_rows_with_images(tmp_path: Path) -> None:
    write_prompts(tmp_path / "train.parquet", [MIXED[2]])
    assert "images" not in pq.read_schema(tmp_path / "train.parquet").names


def test_images_are_part_of_a_fingerprint_and_not_of_the_repr() -> None:
    tokenizer = tiny_tokenizer()

    def mark(*prompts: Prompt) -> str:
        return TokenizedPrompts.tokenize(prompts, tokenizer, 10_000).fingerprint()

    assert repr(MIXED[0]) == repr(replace(MIXED[0], images=()))
    assert MIXED[2].content() == repr(MIXED[2]).encode()
    swapped = replace(MIXED[1], images=MIXED[1].images[::-1])
    assert len({mark(prompt) for prompt in (MIXED[0], replace(MIXED[0], images=(B,)), MIXED[1], swapped)}) == 4


def test_a_table_without_its_images_keeps_the_markers(tmp_path: Path) -> None:
    table = stored(
        tmp_path, "images", [[{"bytes": A, "path": None}], None, []], pa.list_(STRUCT), ["how many", "1+1=", "2"]
    )
    assert [prompt.messages[0]["content"] for prompt in table] == ["<image>how many", "1+1=", "2"]
    for bare in (table.without("images"), pickle.loads(pickle.dumps(table.without("images").without("images")))):
        assert list(bare) == [replace(prompt, images=()) for prompt in table]
    joined = JoinedPrompts([table, list(table)])
    assert [len(prompt.images) for prompt in joined.without("images")] == [0, 0, 0, 1, 0, 0]
    assert list(table.without("extra_info")[:1]) == [replace(table[0], extra_info={})]


@pytest.mark.parametrize(
    ("column", "kind", "value"),
    [
        ("images", pa.list_(STRUCT), [{"bytes": A, "path": "gone.png"}]),
        ("images", pa.list_(STRUCT), [{"bytes": None, "path": "here/a.png"}]),
        ("images", pa.list_(pa.binary()), [A]),
        ("images", pa.list_(pa.large_binary()), [A]),
        ("images", pa.large_list(pa.string()), ["here/a.png"]),
        ("images", STRUCT, {"bytes": A, "path": None}),
        ("image", STRUCT, {"bytes": A, "path": None}),
        ("image", pa.struct([("path", pa.string())]), {"path": "here/a.png"}),
        ("image", pa.binary(), A),
    ],
)
def test_images_are_read_as_others_store_them(tmp_path: Path, column: str, kind: Any, value: Any) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.png").write_bytes(A)
    table = stored(tmp_path, column, [value], kind)
    assert table[0].images == (A,)
    assert table.without("images")[0].messages == ({"role": "user", "content": "<image>"},)


def test_an_absolute_path_is_read_and_a_missing_one_names_the_row(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(A)
    paths, kind = [[str(tmp_path / "a.png")], ["b.png"]], pa.list_(pa.string())
    assert stored(tmp_path, "images", paths[:1], kind)[0].images == (A,)
    with pytest.raises(DataError, match=r"row 1 \(the first is 0\): image 0: no such file: .*b\.png"):
        stored(tmp_path, "images", paths, kind, ["<image>", "<image>"])


@pytest.mark.parametrize("kind", ["absolute", "dots", "link to a file", "link to a folder", "pipe", "folder", "NUL"])
def test_a_path_leads_to_a_regular_file_in_the_folder_of_the_data(kind: str, tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret.png", tmp_path / "data"
    secret.write_bytes(A)
    folder.mkdir()
    paths = {"absolute": str(secret), "dots": "../secret.png", "folder": ".", "NUL": "a\0b"}
    if kind == "link to a file":
        (folder / "link.png").symlink_to(secret)
    elif kind == "link to a folder":
        (folder / "link").symlink_to(tmp_path)
    elif kind == "pipe":
        os.mkfifo(folder / "pipe.png")
    path = {"link to a file": "link.png", "link to a folder": "link/secret.png", "pipe": "pipe.png"}.get(kind)
    outside = kind in ("absolute", "dots", "link to a file", "link to a folder")
    says = "lies outside the data's folder" if outside else "image 0: .*(no such file|cannot be read)"
    with pytest.raises(DataError, match=rf"row 0 \(the first is 0\): .*{says}"):
        stored(folder, "images", [[path or paths[kind]]], pa.list_(pa.string()))
    with pytest.raises(DataError, match=says):
        stored(folder, "image", [{"bytes": None, "path": path or paths[kind]}], STRUCT)


def test_links_within_the_folder_and_folders_that_are_links_are_followed(tmp_path: Path) -> None:
    real, link = tmp_path / "disk", tmp_path / "data"
    (real / "images").mkdir(parents=True)
    (real / "images" / "a.png").write_bytes(A)
    (real / "b.png").symlink_to("images/a.png")
    link.symlink_to(real)
    paths = [["b.png"], ["images/../images/a.png"], [str(link / "b.png")], [str(real / "b.png")]]
    assert [prompt.images for prompt in stored(link, "images", paths, pa.list_(pa.string()), ["<image>"] * 4)] == [
        (A,)
    ] * 4


def test_files_of_a_snapshot_in_the_hubs_cache_lie_in_its_blobs(tmp_path: Path) -> None:
    repo = tmp_path / "datasets--me--mine"
    snapshot, blob = repo / "snapshots" / "abc", repo / "blobs" / "0123"
    for folder in (snapshot, blob.parent, repo / "refs"):
        folder.mkdir(parents=True)
    blob.write_bytes(A)
    (repo / "refs" / "main").write_bytes(A)
    (snapshot / "a.png").symlink_to("../../blobs/0123")
    kind = pa.list_(pa.string())
    assert stored(snapshot, "images", [["a.png"]], kind)[0].images == (A,)
    with pytest.raises(DataError, match="lies outside the data's folder"):
        stored(snapshot, "images", [["../../refs/main"]], kind)


def test_a_file_of_an_image_has_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcli.images.row_images.MAX_FILE_BYTES", 1 << 20)
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate((1 << 20) + 1)
    with pytest.raises(DataError, match=r"image 0: .* cannot be read: it has more than 1 MiB"):
        stored(tmp_path, "images", [["a.png"]], pa.list_(pa.string()))


def test_columns_of_other_types_are_no_images(tmp_path: Path) -> None:
    assert stored(tmp_path, "images", [3], pa.int64())[0].images == ()
    assert stored(tmp_path, "image", ["a.png"], pa.string())[0].images == ()
    assert stored(tmp_path, "images", [None], pa.null())[0].messages[0]["content"] == "<image>"


@pytest.mark.parametrize(
    ("text", "images", "why"),
    [
        ("<image><image>", [A], "the row has 1 image, and its messages have 2 <image> markers"),
        ("<image>", [A, B], "the row has 2 images, and its messages have 1 <image> marker"),
        ("<image>", [], "the row has 0 images, and its messages have 1 <image> marker"),
        ([{"role": "system", "content": "Hi."}], [A], "the row has 1 image, and its messages have no user message"),
        ("<image>", [b""], "image 0 has neither bytes nor a path"),
        ("<image>", [None], "image 0 has neither bytes nor a path"),
    ],
)
def test_images_that_do_not_fit_the_messages_name_the_row(tmp_path: Path, text: Any, images: Any, why: str) -> None:
    with pytest.raises(DataError, match=r"row 1 \(the first is 0\)") as raised:
        stored(tmp_path, "images", [[A], images], pa.list_(pa.binary()), ["<image>", text])
    assert why in str(raised.value)


def test_parts_become_text_with_markers(tmp_path: Path) -> None:
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "How many"}, {"type": "text", "text": "?"}]
    chat = [{"role": "user", "content": parts}]
    table = stored(tmp_path, "images", [[A]], pa.list_(pa.binary()), [chat])
    assert table[0].messages == ({"role": "user", "content": "<image>How many?"},)
    assert table.without("images")[0].messages == table[0].messages
    bad = [{"role": "user", "content": [{"type": "video", "text": None}]}]
    with pytest.raises(DataError, match="'prompt' must be a list of messages"):
        stored(tmp_path, "images", [[]], pa.list_(pa.binary()), [bad])
    pq.write_table(pa.Table.from_pylist([plain() | {"prompt": chat}]), tmp_path / "train.parquet")
    with pytest.raises(DataError, match="the row has 0 images, and its messages have 1 <image> marker"):
        read_prompts(tmp_path, "train")


@pytest.mark.parametrize("text", ["", "no image", "<image>", "<image><image>x", "a<image>b<image>", "<imag<image>e>"])
def test_parts_and_text_are_inverse(text: str) -> None:
    assert content_text(content_parts(text)) == text


def test_tokens_of_rows_with_images_are_not_cached(tmp_path: Path) -> None:
    write_prompts(tmp_path / "train.parquet", MIXED)
    assert content_of(read_prompts(tmp_path, "train")) == ""
    write_prompts(tmp_path / "train.parquet", [MIXED[2]])
    assert content_of(read_prompts(tmp_path, "train"))
