"""`rlcli runs prompts`: statistics of each prompt, filters and order."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlcli.cli.main import main
from rlcli.config.load import dump_toml, resolve
from rlcli.runs.folder import PROMPTS, append_line
from tests.shown_runs import HOSTILE, make_run

STEPS = [
    [["a:0", 8, 8, 40, False], ["a:1", 8, 2, 90, True], ["b:2", 8, 0, 200, False]],
    [["a:0", 8, 8, 30, False], ["a:1", 6, 3, 80, True], ["b:3", 0, 0, 20, False]],
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = make_run(tmp_path / "runs" / "first")
    for step, groups in enumerate(STEPS, 1):
        append_line(folder / PROMPTS, json.dumps({"step": step, "groups": groups}))
    (folder / "config.toml").write_text(dump_toml(resolve("dapo", {}, ["data.retire=2"])))
    return folder


def listed_prompts(capsys: pytest.CaptureFixture[str], words: str = "") -> list[dict[str, Any]]:
    assert main(["runs", "prompts", "first", "--json", *shlex.split(words)]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", ["b:2", "a:1", "a:0", "b:3"]),
        ("--limit 1", ["b:2"]),
        ("--reverse", ["b:3", "a:0", "a:1", "b:2"]),
        ("--sort rate", ["b:2", "a:1", "a:0", "b:3"]),
        ("--sort last --reverse --limit 0", ["b:3", "a:0", "a:1", "b:2"]),
        ("--sort groups", ["a:0", "a:1", "b:2", "b:3"]),
        ("--sort step", ["a:0", "a:1", "b:3", "b:2"]),
        ("--sort id", ["a:0", "a:1", "b:2", "b:3"]),
        ("--min-rate 0.5", ["a:1", "a:0"]),
        ("--max-rate 0.5", ["b:2", "a:1"]),
        ("--min-groups 2", ["a:1", "a:0"]),
        ("--wasted", ["b:2", "a:0", "b:3"]),
        ("--retired", ["a:0"]),
        ("--prompt b:", ["b:2", "b:3"]),
        ("--prompt 'no such id'", []),
    ],
)
def test_prompts_are_filtered_and_sorted(
    words: str, wanted: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [prompt["prompt_id"] for prompt in listed_prompts(capsys, words)] == wanted


def test_a_prompt_has_all_figures_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (prompt,) = listed_prompts(capsys, "--prompt a:1")
    assert prompt == {
        "prompt_id": "a:1",
        "groups": 2,
        "samples": 14,
        "right": 5,
        "kept": 2,
        "tokens": 170,
        "first": 0.25,
        "last": 0.5,
        "step": 2,
        "in_a_row": 0,
        "retired": False,
        "pass_rate": 5 / 14,
    }
    (unjudged,) = listed_prompts(capsys, "--prompt b:3")
    assert (unjudged["pass_rate"], unjudged["first"], unjudged["last"]) == (None, None, None)


def test_a_table_is_printed_with_totals_and_without_control_codes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "prompts", "first", "--limit", "3"]) == 0
    stdout, stderr = capsys.readouterr()
    assert "4 prompts in 6 groups, 4 of them dropped; 460 tokens; retired: 1" in stdout
    line = next(line for line in stdout.splitlines() if "a:1" in line)
    assert line.split() == ["a:1", "2", "2", "36%", "25%", "50%", "170", "2"]
    assert "1 more: --limit 0 lists all" in stderr
    append_line(run / PROMPTS, json.dumps({"step": 3, "groups": [[HOSTILE, 8, 4, 900, True]]}))
    assert main(["runs", "prompts", "first"]) == 0
    stdout = capsys.readouterr().out
    assert "5 prompts in 7 groups" in stdout
    assert not {"\x1b", "\u202e"} & set(stdout)


def test_lines_that_are_not_ours_are_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in ('{"step": 3, "groups": [["a:1", 8]]}', '{"step": 3, "groups": 7}', '{"step": 3}', '{"step": 3, "gr'):
        append_line(run / PROMPTS, line)
    assert main(["runs", "prompts", "first"]) == 0
    stdout, stderr = capsys.readouterr()
    assert "4 prompts in 6 groups" in stdout
    assert "3 groups in" in stderr
    (run / "config.toml").write_text("data = 7\n")
    assert [prompt["retired"] for prompt in listed_prompts(capsys)] == [False] * 4


def test_a_run_without_the_file_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / PROMPTS).unlink()
    assert main(["runs", "prompts", "first"]) == 2
    assert "prompts.jsonl has no prompts" in capsys.readouterr().err
