"""Files of responses for `rlcli verifiers run`: read row by row, and refused with the line and the fix."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcli.cli.main import main
from rlcli.errors import RlcliError
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.response_files import Row, RowFile, _groups, verify_rows
from rlcli.types import VerifyRequest

ROW = {"completion": "café", "ground_truth": "café"}
LINE = json.dumps(ROW, ensure_ascii=False) + "\n"


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def test_rows_are_read_again_in_each_iteration(tmp_path: Path) -> None:
    rows = RowFile(write(tmp_path / "rows.jsonl.gz", gzip.compress((LINE * 3 + "x\n").encode())), skip_bad=True)
    assert (len(rows), rows.skipped) == (3, 1)
    assert [row.request.completion for row in rows] == [row.request.completion for row in rows] == ["café"] * 3
    assert rows.skipped == 1


def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO((LINE * 2).encode())))
    rows = RowFile("-")
    assert [row.fields for row in rows] == [row.fields for row in rows] == [ROW, ROW]


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        path = write(tmp_path / "rows.jsonl", (json.dumps({**ROW, "text": "x" * 2000}) + "\n").encode() * count)
        tracemalloc.start()
        try:
            assert sum(1 for _ in RowFile(path)) == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(10)
    assert peak(2000) - peak(200) < 200_000


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (LINE.encode("utf-16"), "is text in UTF-16, not in UTF-8; convert it: iconv -f UTF-16 -t UTF-8"),
        (LINE.encode("utf-16-be"), "is text in UTF-16BE, not in UTF-8"),
        (LINE.encode("utf-32"), "is text in UTF-32, not in UTF-8"),
        ((LINE + LINE).encode("latin-1"), "line 1: it is not UTF-8 (byte 0xe9 at 19); if the file is in Latin-1"),
        ((LINE + '{"completion": "x",\n' + LINE).encode(), "line 2: it is not JSON: Expecting property name"),
        (b"", "has no row to verify"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_fix(
    tmp_path: Path, content: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "rows.jsonl", content)
    with pytest.raises(RlcliError) as error:
        RowFile(path)
    assert says in str(error.value)
    assert main(["verifiers", "run", "exact", "--input", path, "--output", str(tmp_path / "out.jsonl")]) == 2
    assert says in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_mark_of_utf8_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    assert [row.fields for row in RowFile(write(tmp_path / "rows.jsonl", LINE.encode("utf-8-sig")))] == [ROW]


def test_further_fields_are_columns_for_the_verifier(tmp_path: Path) -> None:
    row = {**ROW, "answer": 4, "level": "a", "extra_info": {"level": "b"}}
    (parsed,) = RowFile(write(tmp_path / "rows.jsonl", json.dumps(row).encode()))
    assert parsed.fields == row
    assert parsed.request.extra_info == {"answer": 4, "level": "b"}


def test_rows_of_one_prompt_in_a_row_are_a_group_of_trls_function() -> None:
    pairs = [("a", "1"), ("a", "1"), ("a", "2"), ("b", "3"), ("", "4"), ("", "5"), ("a", "6"), ("a", "7")]
    rows = [
        Row({}, VerifyRequest(completion, "4", ({"role": "user", "content": prompt},) if prompt else ()))
        for prompt, completion in pairs
    ]
    assert [len(group) for group in _groups(rows)] == [3, 1, 1, 1, 2]
    verifier = "foreign_rewards:unique_in_group"
    with ScoringPool(1, 5.0, [verifier]) as pool:
        verified = list(verify_rows(verifier, rows, pool))
    assert [row for row, _ in verified] == rows
    assert [verdict.score for _, verdict in verified] == [0.0, 0.0, *[1.0] * 6]
