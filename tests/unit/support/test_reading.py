"""Files that others may have written: only regular files are read, with bounds."""

from __future__ import annotations

import io
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcli.support.reading import (
    DEEPEST,
    UnfitFile,
    bounded_lines,
    check_model_folder,
    check_regular,
    json_object,
    json_objects,
    opened,
    parse_json,
    parse_toml,
    read_bytes,
    read_json,
    read_text,
    read_toml,
)

GIB = 1 << 30


def make_socket(path: Path) -> None:
    working_folder = Path.cwd()
    os.chdir(path.parent)  # a socket's whole path would be too long
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(working_folder)


def make_sparse(path: Path, size: int = 10 * GIB) -> None:
    with path.open("wb") as file:
        file.truncate(size)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is a named pipe, not a regular file"),
    "socket": (make_socket, "is a socket, not a regular file"),
    "folder": (Path.mkdir, "is a folder, not a regular file"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "is a link, to '/dev/zero'"),
    "random": (lambda path: path.symlink_to("/dev/urandom"), "is a link, to '/dev/urandom'"),
    "elsewhere": (lambda path: path.symlink_to("/etc/passwd"), "is a link, to '/etc/passwd'"),
    "nowhere": (lambda path: path.symlink_to("nowhere"), "is a link, to 'nowhere'"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_regular_file_is_named_and_not_opened(kind: str, tmp_path: Path) -> None:
    make, says = ODD[kind]
    path = tmp_path / "metrics.jsonl"
    make(path)
    for read in (check_regular, opened, read_json, read_toml, read_text, lambda path: list(json_objects(path))):
        with pytest.raises(UnfitFile) as refused:
            read(path)
        assert refused.value.message == f"{path} {says}"


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "endless", "random"])
def test_a_link_that_may_be_followed_still_leads_to_a_regular_file(kind: str, tmp_path: Path) -> None:
    make, _ = ODD[kind]
    make(tmp_path / "odd")
    (tmp_path / "link").symlink_to("odd")
    with pytest.raises(UnfitFile, match="not a regular file"):
        opened(tmp_path / "link", links=True)
    (tmp_path / "plain").write_text("1")
    (tmp_path / "good").symlink_to("plain")
    assert read_json(tmp_path / "good", links=True) == 1


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "none")
    (tmp_path / "broken").symlink_to("none")
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "broken", links=True)


def test_a_larger_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    make_sparse(tmp_path / "config.toml")
    with pytest.raises(UnfitFile, match=r"config.toml has 10,737,418,240 bytes, more than 4 MiB; put the file"):
        read_toml(tmp_path / "config.toml")
    (tmp_path / "small").write_bytes(b"1234")
    assert read_bytes(tmp_path / "small", 4) == b"1234"
    with pytest.raises(UnfitFile, match="has 4 bytes, more than 3 bytes"):
        read_bytes(tmp_path / "small", 3)


def test_a_line_without_end_is_refused_after_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "started"}\n')
    with path.open("r+b") as file:
        file.truncate(10 * GIB)
    lines = json_objects(path)
    assert next(lines) == {"event": "started"}
    with pytest.raises(UnfitFile, match=r"events.jsonl has a line of more than 16 MiB \(line 2\)"):
        next(lines)


def test_lines_are_bounded_one_by_one_and_in_all() -> None:
    assert list(bounded_lines(io.BytesIO(b"abc\nd"), "x", max_line_bytes=4)) == [b"abc\n", b"d"]
    with pytest.raises(UnfitFile, match=r"x has a line of more than 3 bytes \(line 1\)"):
        list(bounded_lines(io.BytesIO(b"abc\nd"), "x", max_line_bytes=3))
    assert len(list(bounded_lines(io.BytesIO(b"abc\nd"), "x", max_bytes=5))) == 2
    with pytest.raises(UnfitFile, match="more than 4 bytes"):
        list(bounded_lines(io.BytesIO(b"abc\nd"), "x", max_bytes=4))


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n\xff\xfe\n[1]\n{"b": \n{"c": "\xff"}\n' + b"[" * 9000 + b"\n" + b'{"d": 2}')
    assert list(json_objects(path)) == [{"a": 1}, {"c": "�"}, {"d": 2}]


@pytest.mark.parametrize("deep", [DEEPEST + 2, 1_000, 100_000])
def test_deep_nesting_is_an_error_of_the_text(deep: int) -> None:
    for text in ("[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(text)
        assert json_object(text.encode()) is None
    for text in ("a = " + "[" * deep + "]" * deep, ".".join("a" * deep) + " = 1", '"a".' * deep + "b = 1"):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_toml(text)


def test_what_runs_write_is_not_too_deep() -> None:
    text = "[" * DEEPEST + "]" * DEEPEST
    assert parse_json(text) is not None
    assert parse_json('{"text": "' + "[" * 1000 + '"}') == {"text": "[" * 1000}
    assert parse_json("[" + "[]," * 1000 + "[]]") == [[]] * 1001
    sentence = "one. two. three. " * 20
    assert parse_toml(f'text = "{sentence}"\nnumbers = [{"1.5, " * 500}]')["text"] == sentence
    assert parse_toml("a.b.c = 1") == {"a": {"b": {"c": 1}}}


def test_an_unfit_file_crosses_processes_as_it_is() -> None:
    error = UnfitFile("x.json", "is a folder", "remove it")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.message, copy.hint) == (str(error), error.message, error.hint)


def test_the_files_of_a_model_are_regular_and_of_a_size(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "config.json").symlink_to("blob")  # as in the hub's cache
    (tmp_path / "gone.json").symlink_to("nowhere")
    (tmp_path / "original").mkdir()
    make_sparse(tmp_path / "model.safetensors")
    check_model_folder(tmp_path)
    check_model_folder(tmp_path / "none")
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(UnfitFile, match=r"tokenizer\.json is a named pipe"):
        check_model_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    make_sparse(tmp_path / "chat_template.jinja")
    with pytest.raises(UnfitFile, match=r"chat_template\.jinja has .* more than 16 MiB"):
        check_model_folder(tmp_path)
