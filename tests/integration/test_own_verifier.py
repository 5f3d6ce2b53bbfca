"""The page on writing a verifier of one's own, as it is written: its file and all its commands, on the real stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import SOON, Cli

from tests.page_folder import REWARDS
from tests.pages import blocks, commands

# tests/unit/docs runs the commands of the page, and its file.
pytestmark = [pytest.mark.timeout(600), pytest.mark.exhaustive]

PAGE = "your_own_verifier.md"


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's file, one of functions written for other tools, and a few responses."""
    (tmp_path / "last_word.py").write_text(blocks(PAGE, "python")[0])
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    rows = [{"completion": "So it is Paris", "ground_truth": "paris"}, {"completion": "Rome", "ground_truth": "Paris"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_documented_file_and_commands_work(cli: Cli, tiny: Path, sums: Path, page_folder: Path) -> None:
    replacements = {"Qwen/Qwen2.5-0.5B-Instruct": str(tiny), "data": str(sums), "data/gsm8k": str(sums)}
    replacements["data/train.parquet"] = str(sums / "train.parquet")
    trained = 0
    for program, *words in commands(PAGE):
        assert program == "rlcli"
        words = [replacements.get(word, word) for word in words]
        if words[0] == "train":
            # The first trains; of the others the plan is enough: it has loaded the verifiers and read the options.
            words += [*SOON, "--steps", "1", *(["--dry-run"] if trained else ["--out", "run"])]
            trained += 1
        done = cli(*words)
        if words[:2] == ["verifiers", "run"] and "--output" in words:
            scored = [json.loads(line) for line in (page_folder / "scored.jsonl").read_text().splitlines()]
            assert [row["outcome"] for row in scored] == ["ok", "wrong"]
        if words[:2] == ["verifiers", "audit"]:
            assert "pass" in (done.stdout + done.stderr).lower()
    assert trained == 4
    (step,) = [json.loads(line) for line in (page_folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert step["outcome/crash"] == step["outcome/timeout"] == 0

    # The page's file is part of the run: edited, it is refused, or accepted and recorded.
    file = page_folder / "last_word.py"
    file.write_text(file.read_text() + "# edited\n")
    further = ("train", "--resume", "run", "--steps", "2")
    assert f"{file} (verifier.name) has changed: was " in cli(*further, expect=2).stderr
    cli(*further, "--accept-changes")
    events = [json.loads(line) for line in (page_folder / "run" / "events.jsonl").read_text().splitlines()]
    (changed,) = [event for event in events if event["event"] == "inputs_changed"]
    assert (changed["step"], [entry["path"] for entry in changed["files"]]) == (1, [str(file)])
    assert len(list((page_folder / "run" / "sources").glob("*-last_word.py"))) == 2
    assert len((page_folder / "run" / "metrics.jsonl").read_text().splitlines()) == 2
