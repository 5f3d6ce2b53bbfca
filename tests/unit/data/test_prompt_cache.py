from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcli.data.prompts import parallel_map, token_cache
from rlcli.data.prompts import tokenized_prompts as prompts
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.data.prompts.prompt_table import PromptTable, read_prompts
from rlcli.data.prompts.token_cache import tokenized
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.errors import ModelError, SetupError
from rlcli.model.io.tiny_model import tiny_tokenizer


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write(tmp_path / "train.parquet")


def write(path: Path, count: int = 40, last: str = "?") -> Path:
    contents = [*("1+" * (i % 7) for i in range(count - 1)), last]
    write_rows(
        path,
        [
            row(
                data_source="toy",
                messages=[{"role": "user", "content": content}],
                verifier="gsm8k",
                ground_truth="2",
                extra_info={"response": f"#### {i}"},
            )
            for i, content in enumerate(contents)
        ],
    )
    return path


def read(data: Path, verifier: str = "auto") -> PromptTable:
    return read_prompts(data, "train", verifier)


def made_of(prompts: Any, tokenizer: Any = None, limit: int = 11, **options: Any) -> TokenizedPrompts:
    return tokenized(prompts, tokenizer or tiny_tokenizer(), limit, least=0, **options)


def entries(data: Path) -> list[Path]:
    room = data.parent / "cache" / "rlcli" / "prompts"
    return sorted(room.iterdir()) if room.is_dir() else []


def is_same(a: TokenizedPrompts, b: TokenizedPrompts) -> bool:
    names = ("flat", "offsets", "control", "response_flat", "response_offsets")
    equal = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)
    counts = (a.too_long, a.too_long_responses) == (b.too_long, b.too_long_responses)
    return equal and counts and list(a.prompts) == list(b.prompts) and a.fingerprint() == b.fingerprint()


@pytest.mark.parametrize("response", ["", "response"])
def test_a_second_start_reads_what_the_first_has_made(
    data: Path, monkeypatch: pytest.MonkeyPatch, response: str
) -> None:
    options = {"response": response, "max_response_tokens": 7} if response else {}
    plain = TokenizedPrompts.tokenize(read(data), tiny_tokenizer(), 11, **options)
    first = made_of(read(data), **options)
    mark = first.fingerprint()
    assert plain.too_long > 0
    assert is_same(first, plain)
    with monkeypatch.context() as patched:
        patched.setattr(prompts, "_encoded", None)
        patched.setattr(prompts, "_text", None)
        second = made_of(read(data), **options)
        assert second.fingerprint() == mark
    assert is_same(second, plain)
    assert len(entries(data)) == 1
    assert all(isinstance(array, np.memmap) for array in (first.flat, second.flat, second.offsets))


def test_whatever_changes_tokens_or_rows_has_an_entry_of_its_own(data: Path) -> None:
    made_of(read(data))
    other = tiny_tokenizer()
    other.chat_template = other.chat_template + "{# another #}"
    trimmed = tiny_tokenizer()
    trimmed.eos_token = "0"
    for rebuild in (
        lambda: made_of(read(data), other),
        lambda: made_of(read(data), trimmed),
        lambda: made_of(read(data), limit=12),
        lambda: made_of(read(data, "format")),
        lambda: made_of(read(data)[:20]),
        lambda: made_of(read(data), response="response", max_response_tokens=9),
        lambda: made_of(read(data), response="response", max_response_tokens=8),
        lambda: made_of(read(write(data, last="!"))),
    ):
        entry_count = len(entries(data))
        rebuild()
        assert len(entries(data)) == entry_count + 1


def test_a_copied_file_is_known(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_of(read(data))
    moved = data.parent / "elsewhere.parquet"
    shutil.copy(data, moved)
    monkeypatch.setattr(prompts, "_encoded", None)
    assert len(made_of(read_prompts(moved, "train"))) > 0


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no note", "not JSON", "other note"])
def test_a_damaged_entry_is_made_again(data: Path, damage: str) -> None:
    plain = made_of(read(data))
    (entry,) = entries(data)
    flat, note = entry / "flat.npy", entry / "entry.json"
    content = bytearray(flat.read_bytes())
    content[-1] ^= 1
    {
        "truncated": lambda: flat.write_bytes(content[:-9]),
        "flipped": lambda: flat.write_bytes(content),
        "missing": flat.unlink,
        "no note": note.unlink,
        "not JSON": lambda: note.write_text("{"),
        "other note": lambda: note.write_text("[]"),
    }[damage]()
    plain = TokenizedPrompts.tokenize(read(data), tiny_tokenizer(), 11)
    assert is_same(made_of(read(data)), plain)
    assert json.loads((entry / "entry.json").read_text())["values"]["mark"] == plain.fingerprint()


def test_without_a_place_to_keep_them_prompts_are_made(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TokenizedPrompts.tokenize(read(data), tiny_tokenizer(), 11)
    (data.parent / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(data.parent / "file"))
    assert is_same(made_of(read(data)), plain)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert is_same(made_of(read(data)), plain)


def test_small_sets_and_rows_without_a_file_are_not_kept(data: Path) -> None:
    tokenized(read(data), tiny_tokenizer(), 11)
    made_of(list(read(data)))
    assert not entries(data)


def test_a_file_that_is_replaced_after_it_was_read_is_not_kept(data: Path) -> None:
    table = read(data)
    write(data, count=41)
    made_of(table)
    assert not entries(data)


def test_two_at_once_leave_one_whole_entry(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes the entry while this one does."""
    store = token_cache._store

    def late(entry: Path, prompts: TokenizedPrompts) -> None:
        store(entry, prompts)
        store(entry, prompts)

    monkeypatch.setattr(token_cache, "_store", late)
    plain = TokenizedPrompts.tokenize(read(data), tiny_tokenizer(), 11)
    assert is_same(made_of(read(data)), plain)
    assert [path.name[0] == "." for path in entries(data)] == [False]


def test_old_entries_and_too_much_of_them_go(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_of(read(data))
    (first,) = entries(data)
    size = sum(file.stat().st_size for file in first.iterdir())
    os.utime(first, (0, 0))
    (half := first.parent / ".half").mkdir()
    os.utime(half, (0, 0))
    made_of(read(data), limit=12)
    (second,) = entries(data)
    assert second != first
    monkeypatch.setattr(token_cache, "MOST_BYTES", 2 * size)
    os.utime(second, (2e9, 2e9))
    made_of(read(data), limit=13)
    made_of(read(data), limit=14)
    assert second in entries(data), "used last"
    assert len(entries(data)) <= 2


@pytest.mark.long
def test_processes_make_what_one_does(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TokenizedPrompts.tokenize(read(data), tiny_tokenizer(), 11, response="response", max_response_tokens=7)
    mark = plain.fingerprint()
    monkeypatch.setattr(prompts, "MANY", 10)
    monkeypatch.setattr(prompts, "CHUNK", 9)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    progress: list[tuple[int, int]] = []
    many = TokenizedPrompts.tokenize(
        read(data),
        tiny_tokenizer(),
        11,
        lambda done, total: progress.append((done, total)),
        response="response",
        max_response_tokens=7,
    )
    assert is_same(many, plain)
    assert many.fingerprint() == mark
    assert progress == [(9, 40), (18, 40), (27, 40), (36, 40), (40, 40)]
    refusing = tiny_tokenizer()
    refusing.chat_template = "{{ raise_exception('not today') }}"
    with pytest.raises(ModelError, match="refuses prompt toy:train:0: not today"):
        TokenizedPrompts.tokenize(read(data), refusing, 11)


def test_results_come_in_order_and_errors_as_they_are() -> None:
    assert list(parallel_map.spread(math.sqrt, [1.0, 4.0, 9.0, 16.0], 2)) == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="math domain error"):
        list(parallel_map.spread(math.sqrt, [1.0, -1.0], 1))
    with pytest.raises(SetupError, match=r"died \(exit status 3\)"):
        list(parallel_map.spread(os._exit, [3], 1))


def test_control_tokens_in_the_text_are_remembered(data: Path) -> None:
    write(data, last="<|user|>?")
    first, second = made_of(read(data)), made_of(read(data))
    assert first.control.tolist() == second.control.tolist() == [len(first) - 1]
    assert first.prompts[len(first) - 1].messages[0]["content"] == "<|user|>?"
