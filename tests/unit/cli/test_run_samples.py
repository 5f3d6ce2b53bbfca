"""`rlcli runs samples`: filters, order and printed text."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcli.cli.main import main
from tests.shown_runs import HOSTILE, add_samples, make_run, row

TALK = [
    {"role": "user", "content": "What is 7?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 7}}}]},
    {"role": "tool", "content": "Seven"},
    {"role": "assistant", "content": "It is 7"},
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = make_run(tmp_path / "runs" / "first")
    add_samples(folder, 1, [row("4", 0, "It is 4", 1.0), row("4", 1, "Five? No: 5", 0.0)])
    add_samples(folder, 2, [row("4", 0, "4", 1.0), row("9", 0, "I refuse", 0.0, "no_answer")], rank=0)
    add_samples(folder, 2, [row("7", 0, "It is 7", 0.5, "wrong", messages=TALK, turns=2, ended="done")], rank=1)
    return folder


def listed_samples(capsys: pytest.CaptureFixture[str], words: str = "") -> list[dict[str, Any]]:
    assert main(["runs", "samples", "first", "--json", *shlex.split(words)]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_one_sample_of_each_group_comes_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = [row(truth, sample, truth, 1.0) for truth in ("4", "9") for sample in range(3)]
    add_samples(run, 3, group)
    rows = [(entry["ground_truth"], entry["sample"]) for entry in listed_samples(capsys, "--step 3")]
    assert rows == [("4", 0), ("9", 0), ("4", 1), ("9", 1), ("4", 2)]
    of_prompt = listed_samples(capsys, "--step 3 --prompt a:train:9")
    assert [entry["sample"] for entry in of_prompt] == [0, 1, 2]


def test_the_help_keeps_a_prompts_id_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "samples", "--help"]) == 0
    assert "rlcli/arithmetic:train:7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", [(2, "4", 0), (2, "9", 0), (2, "7", 0), (1, "4", 0), (1, "4", 1)]),
        ("--limit 2", [(2, "4", 0), (2, "9", 0)]),
        ("--step 1", [(1, "4", 0), (1, "4", 1)]),
        ("--wrong", [(2, "9", 0), (2, "7", 0), (1, "4", 1)]),
        ("--outcome no_answer --outcome wrong", [(2, "9", 0), (2, "7", 0), (1, "4", 1)]),
        ("--wrong --step 1", [(1, "4", 1)]),
        ("--min-reward 0.5 --max-reward 0.9", [(2, "7", 0)]),
        ("--prompt a:train:4 --min-reward 1", [(2, "4", 0), (1, "4", 0)]),
        ("--text REFUSE", [(2, "9", 0)]),
        ("--text seven", [(2, "7", 0)]),
        ("--text 'no such text'", []),
    ],
)
def test_samples_are_found_newest_first(
    words: str, wanted: list[tuple[int, str, int]], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(sample["step"], sample["ground_truth"], sample["sample"]) for sample in listed_samples(capsys, words)]
    assert rows == wanted


def test_conversations_are_printed_with_roles_calls_and_ends(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "samples", "first", "--prompt", "a:train:7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "── step 2 · a:train:7 · sample 0 · score 0.5 · wrong · 7 tokens · 2 turns · done"
    assert lines[1] == "answer 7, ground truth 7"
    assert lines[2:6] == [
        "user: What is 7?",
        'assistant: {"name": "add", "arguments": {"a": 7}}',
        "tool: Seven",
        "assistant: It is 7",
    ]


def test_advantages_are_shown_where_they_are_recorded(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"prompt_id": ["a:train:4", "a:train:9", "a:train:9"], "sample": [0, 0, 0], "advantage": [-0.25, 1.0, 2.0]}
    pq.write_table(pa.table(rows), run / "samples" / "step-000002" / "advantages.parquet")
    advantages = {sample["prompt_id"]: sample["advantage"] for sample in listed_samples(capsys, "--step 2")}
    assert advantages == {
        "a:train:4": -0.25,
        "a:train:7": None,
        "a:train:9": None,
    }  # ambiguous: two rows have this prompt and sample
    (run / "samples" / "step-000002" / "advantages.parquet").write_bytes(b"PAR1 half")
    assert {sample["advantage"] for sample in listed_samples(capsys, "--step 2")} == {None}


def test_text_of_a_model_is_harmless_and_shortened(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_samples(run, 3, [row("1", 0, HOSTILE + "x" * 2000, 0.0)])
    assert main(["runs", "samples", "first", "--step", "3"]) == 0
    short = capsys.readouterr().out
    assert "\x1b" not in short
    assert "\u202e" not in short
    assert r"\x1b[2J\x1b]0;title\x07[red]<script>\u202e" in short
    assert "characters more" in short
    assert main(["runs", "samples", "first", "--step", "3", "--full"]) == 0
    assert "x" * 2000 in capsys.readouterr().out


def test_a_broken_file_hides_only_its_own_samples(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "samples" / "step-000002" / "rank-0.parquet").write_bytes(b"PAR1 half")
    assert main(["runs", "samples", "first", "--json", "--step", "2"]) == 0
    captured = capsys.readouterr()
    assert [sample["prompt_id"] for sample in json.loads(captured.out)] == ["a:train:7"]
    assert "rank-0.parquet cannot be read as parquet" in captured.err


def test_samples_of_evaluations_are_shown_if_asked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_samples(run, 0, [row("8", -1, "It is 8", 1.0)], room="evaluations")
    assert main(["runs", "samples", "first", "--evaluations"]) == 0
    assert "── step 0 · a:train:8 · greedy · score 1 · ok" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("first --outcome bad", "--outcome bad is not known; give one of ok, wrong, no_answer"),
        ("first --step 7", "has no samples of step 7; it has steps 1 to 2"),
        ("first --evaluations", "evaluations has no samples; they are saved with tracking.save_samples = true"),
        ("nowhere", "nowhere is not a run: no such folder; give the folder of a run"),
        ("first --limit 0", "Invalid value for '--limit'"),
    ],
)
def test_bad_input_is_one_line(words: str, line: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "samples", *words.split()]) == 2
    captured = capsys.readouterr()
    assert line in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("messages", ["[", "[1]", '[{"role": 3, "content": {"a": 1}, "tool_calls": 5}]', "[" * 100_000])
def test_messages_of_another_version_do_no_harm(messages: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_samples(run, 9, [row("8", 0, "It is 8", 1.0) | {"messages": messages}])
    assert main(["runs", "samples", "first", "--step", "9"]) == 0
    assert "── step 9 · a:train:8" in capsys.readouterr().out
    assert main(["runs", "samples", "first", "--step", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["response"] == "It is 8"


def test_nothing_found_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "samples", "first", "--text", "no such text"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "is like that" in captured.err
