"""`rlcli prep --test-size`: rows of train that are held out for testing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlcli.cli.main import main
from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.types import Prompt


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """100 rows of 80 different prompts: 20 are there twice, once in other spelling."""
    rows = [{"prompt": f"Write {n} in words.", "answer": str(n)} for n in range(80)]
    rows += [{"prompt": f" write  {n} in WORDS.", "answer": str(n)} for n in range(20)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def made(source: Path, *words: str) -> dict[str, list[Prompt]]:
    folder = source.parent / "out"
    assert main(["prep", "jsonl", "--source", str(source), "--out", str(folder), *words]) == 0
    return {split: list(read_prompts(folder, split, "exact")) for split in ("train", "test")}


def question(prompt: Prompt) -> str:
    return " ".join(prompt.messages[-1]["content"].lower().split())


@pytest.mark.parametrize(("size", "minimum", "maximum"), [("0.1", 9, 10), ("20", 19, 20), ("1", 1, 2), ("0.5", 49, 50)])
def test_no_prompt_is_in_both_splits(source: Path, size: str, minimum: int, maximum: int) -> None:
    splits = made(source, "--test-size", size)
    train, test = ({question(prompt) for prompt in splits[name]} for name in ("train", "test"))
    assert not train & test
    assert len(splits["train"]) + len(splits["test"]) == 100
    assert minimum <= len(splits["test"]) <= maximum
    assert {prompt.extra_info["split"] for prompt in splits["test"]} == {"test"}
    assert {prompt.extra_info["split"] for prompt in splits["train"]} == {"train"}


def test_the_split_depends_on_the_seed_and_on_the_prompts_alone(source: Path) -> None:
    def held_out(*words: str) -> set[str]:
        return {question(prompt) for prompt in made(source, "--test-size", "0.2", *words)["test"]}

    first = held_out()
    assert held_out() == first
    assert held_out("--test-seed", "1") != first
    lines = source.read_text().splitlines()
    source.write_text("\n".join(reversed(lines)))
    assert held_out() == first


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--test-size", "0"], "--test-size = 0 is no number of rows; give a number, as 200, or a share, as 0.1"),
        (["--test-size", "1.5"], "--test-size = 1.5 is no number of rows"),
        (["--test-size", "some"], "--test-size = some is no number of rows"),
        (["--test-size", "100"], "--test-size = 100 leaves nothing to train on: there are 100 rows of 80 different"),
        (["--test-seed", "3"], "--test-seed = 3 needs --test-size"),
    ],
)
def test_a_size_that_cannot_be_is_refused(
    source: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = source.parent / "out"
    assert main(["prep", "jsonl", "--source", str(source), "--out", str(folder), *words]) == 2
    assert says in capsys.readouterr().err
    assert not folder.exists()


def test_a_source_with_a_test_split_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, count in (("train", 9), ("test", 3)):
        rows: list[dict[str, Any]] = [{"prompt": f"{name} {n}", "answer": n} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["prep", "jsonl", "--source", str(tmp_path), "--out", str(tmp_path / "out"), "--test-size", "0.3"]
    assert main(words) == 2
    assert "the source has a test split of 3 rows; leave it out, or take the train split alone: --split train" in (
        capsys.readouterr().err
    )
    assert main([*words, "--split", "train"]) == 0
    assert len(read_prompts(tmp_path / "out", "train", "exact")) == 6
