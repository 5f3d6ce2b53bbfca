"""Samples of a step that trackers get, and how they are shortened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcli.data.sample_files import sample_row, write_samples
from rlcli.runs.folder import RunFolder
from rlcli.runs.tracking.tracked_samples import FIRST_MESSAGES, LAST_MESSAGES, MESSAGE_CHARACTERS, MOST, tracked_samples
from rlcli.types import Outcome, Prompt, Verdict
from tests.image_runs import drawing
from tests.tracker_conformance import write_step


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "run") as folder:
        yield folder


def row(**overrides: Any) -> dict[str, Any]:
    prompt = Prompt("p:train:0", ({"role": "user", "content": "Q"},), "p", "math", "gsm8k", "1")
    counts: dict[str, Any] = {"prompt_tokens": 1, "response_tokens": None, "finish_reason": "stop"}
    return sample_row(prompt, 0, overrides.pop("response", "A"), Verdict(0.0, Outcome.NO_ANSWER), **counts, **overrides)


def test_few_samples_are_chosen_from_the_worst_to_the_best(folder: RunFolder) -> None:
    write_step(folder, 3, [number / 20 for number in range(20, -1, -1)])
    scores = [sample.score for sample in tracked_samples(folder.samples, 3)]
    assert len(scores) == MOST
    assert scores == sorted(scores)
    assert (scores[0], scores[-1]) == (0.0, 1.0)


def test_samples_of_all_ranks_are_read(folder: RunFolder) -> None:
    write_step(folder, 3, [0.5])
    write_samples(folder.samples / "step-000003" / "rank-1.parquet", 3, [row()])
    first, second = tracked_samples(folder.samples, 3)
    assert (first.score, first.outcome, first.answer, first.response_tokens) == (0.0, "no_answer", "", None)
    assert first.conversation == "user: Q\n\nassistant: A"
    assert second.score == 0.5
    assert tracked_samples(folder.samples, 4) == []


def test_long_texts_and_conversations_are_cut(folder: RunFolder) -> None:
    talk = [{"role": "user", "content": str(number)} for number in range(50)]
    talk[1] = {"role": "assistant", "content": "x" * (MESSAGE_CHARACTERS + 7)}
    write_samples(folder.samples / "step-000001" / "rank-0.parquet", 1, [row(messages=talk)])
    (sample,) = tracked_samples(folder.samples, 1)
    assert len(sample.messages) == FIRST_MESSAGES + 1 + LAST_MESSAGES
    assert sample.messages[1]["content"] == "x" * MESSAGE_CHARACTERS + "\n… 7 characters more"
    assert sample.messages[FIRST_MESSAGES]["content"] == "… 34 messages more"
    assert sample.messages[-1]["content"] == "49"


def test_images_are_named_by_their_sizes(folder: RunFolder) -> None:
    prompt = Prompt("p:train:0", ({"role": "user", "content": "<image>Q"},), "p", "", "exact", "1", {}, (drawing(0),))
    counts: dict[str, Any] = {"prompt_tokens": 1, "response_tokens": None, "finish_reason": "stop"}
    rows = [sample_row(prompt, 0, "<image>", Verdict(0.0, Outcome.NO_ANSWER), **counts)]
    write_samples(folder.samples / "step-000001" / "rank-0.parquet", 1, rows)
    (sample,) = tracked_samples(folder.samples, 1)
    assert sample.conversation == "user: [image 84 x 56]Q\n\nassistant: <image>"


def test_text_of_a_model_has_no_control_characters_and_no_secrets(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2hunter2")
    write_samples(folder.samples / "step-000001" / "rank-0.parquet", 1, [row(response="\x1b[2J hunter2hunter2")])
    (sample,) = tracked_samples(folder.samples, 1)
    assert sample.messages[-1]["content"] == r"\x1b[2J ***"


def test_calls_of_tools_are_shown(folder: RunFolder) -> None:
    call = {"function": {"name": "python", "arguments": {"code": "1"}}}
    talk = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    write_samples(folder.samples / "step-000001" / "rank-0.parquet", 1, [row(messages=talk)])
    (sample,) = tracked_samples(folder.samples, 1)
    assert json.loads(sample.messages[-1]["content"]) == call["function"]
