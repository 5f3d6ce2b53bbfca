"""Reports on disk: what they keep within their size, what they never overwrite, and that text stays text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rlcli_inspect.report import static_report
from rlcli_inspect.report.page_assembly import FILE, PIECES, SERVED, content_policy, page
from rlcli_inspect.report.static_report import MB, write_report

from rlcli.errors import SetupError
from rlcli.runs.run_data import RunData
from tests.report_runs import add_events, unpacked, write_run

LONG = {(step, prompt, sample): "long " * 400 for step in range(1, 21) for prompt in range(3) for sample in range(4)}


def data_of(html: str) -> dict[str, Any]:
    """The data blocks of a page, by name."""
    blocks = re.findall(r'<script type="application/(\w+)" data-name="([^"]*)">(.*?)</script>', html, re.DOTALL)
    return {name: json.loads(text if kind == "json" else unpacked(text)) for kind, name, text in blocks}


def test_a_small_run_is_one_file_with_everything(tmp_path: Path) -> None:
    written = write_report([RunData(write_run(tmp_path / "run", steps=4))], tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["index.html"]
    assert written.bytes == written.path.stat().st_size
    data = data_of(written.path.read_text())
    assert data["data"]["steps"] == [{"evaluations": [0, 3], "samples": [1, 2, 3, 4]}]
    piece = data["0/samples/4"]
    assert [len(group["rows"]) for group in piece["groups"]] == [4, 4, 4]
    assert data["data"]["kept"]["run"]["samples"]["all"]


def test_a_larger_run_is_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_report, "ONE_FILE", 1000)
    write_report([RunData(write_run(tmp_path / "run", steps=2))], tmp_path / "out")
    piece = (tmp_path / "out" / "data" / "0" / "samples" / "2.js").read_text()
    match = re.fullmatch(r'rlcliPiece\("0/samples/2",(.*)\);\n', piece)
    assert match is not None
    assert json.loads(match[1])["step"] == 2
    assert 'data-name="0/samples/2"' not in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.long
def test_samples_are_kept_by_rule_until_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", steps=20, texts=LONG)
    full_report = write_report([RunData(folder)], tmp_path / "whole")
    limit = MB // 2 + 320_000
    monkeypatch.setattr(static_report, "LEAST_STEPS", 8)
    written = write_report([RunData(folder)], tmp_path / "out", limit)
    samples = written.coverage["run"]["samples"]
    data = data_of(written.path.read_text())
    steps = data["data"]["steps"][0]["samples"]
    assert written.bytes < limit
    assert full_report.coverage["run"]["samples"].all
    assert (samples.total_steps, samples.steps) == (20, len(steps))
    assert 4 <= len(steps) < 20
    assert {1, 20} <= set(steps)
    assert all(len(group["rows"]) == 4 for step in steps for group in data[f"0/samples/{step}"]["groups"])
    assert not samples.all


def test_an_older_report_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    run = RunData(write_run(tmp_path / "run", steps=1))
    report_folder = tmp_path / "out"
    write_report([run], report_folder)
    (report_folder / "data").mkdir()
    (report_folder / "data" / "old.js").touch()
    write_report([run], report_folder)
    assert [path.name for path in report_folder.iterdir()] == ["index.html"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.html").write_text("<html>")
    for target, why in (
        ("mine", "has files that are not a report's"),
        ("run", "has files that are"),
        ("file", "is a file"),
    ):
        (tmp_path / "file").touch()
        with pytest.raises(SetupError, match=why):
            write_report([run], tmp_path / target)
    assert not list(tmp_path.glob(".*"))


def test_a_report_that_fails_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunData(write_run(tmp_path / "run", steps=1))
    initial_page = write_report([run], tmp_path / "out").path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(static_report.Pieces, "add", full)
    with pytest.raises(SetupError, match="No space left on device"):
        write_report([run], tmp_path / "out")
    assert (tmp_path / "out" / "index.html").read_bytes() == initial_page
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_run_gives_a_report_with_notes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    (folder / "config.toml").unlink()
    (folder / "samples" / "step-000001" / "rank-0.parquet").write_bytes(b"PAR1")
    (folder / "samples" / "step-000002" / "advantages.parquet").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    written = write_report([RunData(folder)], tmp_path / "out")
    assert [note.partition(": ")[2].split(" ")[0] for note in written.notes] == [
        "metrics.jsonl:",
        "config.toml",
        "samples/step-000001/rank-0.parquet",
    ]
    shown = data_of(written.path.read_text())["data"]["overview"][0]["notes"]
    assert [f"run: {note}" for note in shown] == list(written.notes)


def test_no_text_of_a_run_is_markup(tmp_path: Path) -> None:
    hostile = "</script><script>x</script>\u2028<!--{{script}}{{policy}}"
    folder = write_run(
        tmp_path / "run", steps=1, texts={(1, 0, 0): hostile}, question=hostile.replace("{", "{{").replace("}", "}}")
    )
    add_events(folder, {"event": "failed", "message": hostile})
    html = write_report([RunData(folder)], tmp_path / "out").path.read_text()
    assert data_of(html)["data"]["overview"][0]["events"][-1]["text"] == hostile
    assert "<script>x" not in html
    assert html.count("</script>") == html.count("<script") == 1 + len(data_of(html))
    assert data_of(html)["0/samples/1"]["groups"][0]["rows"][0]["said"][0]["content"] == hostile


@pytest.mark.parametrize("policy", [SERVED, FILE, PIECES])
def test_the_policy_allows_nothing_from_outside(policy: str) -> None:
    directives = dict(part.split(" ", 1) for part in content_policy(policy).split("; "))
    assert directives["default-src"] == "'none'"
    assert "unsafe" not in content_policy(policy)
    assert not re.search(r"https?:|\*", content_policy(policy))
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)""", page(policy).partition("<script>")[0])
