"""Reads the samples of a step that trackers show: a few, from the run folder, in the trackers' own processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlcli.data.sample_files import is_conversation, sample_files
from rlcli.images.image_descriptions import descriptions, worded_messages
from rlcli.runs.tracking.tracker import TrackedSample
from rlcli.support.redact import printable, redacted

T = TypeVar("T")
MOST = 8
"""Samples of a step that a tracker gets."""
MESSAGE_CHARACTERS = 2000
"""Characters of a message that it gets; the rest is cut off."""
FIRST_MESSAGES, LAST_MESSAGES = 4, 12
"""Messages of a conversation that it gets, if there are more than both."""


def tracked_samples(folder: Path, step: int) -> list[TrackedSample]:
    """Up to MOST samples of a step, evenly spaced by score from the lowest to the highest. folder: the run's `samples`
    or `evaluations`. Empty if the step has none."""
    import pyarrow.parquet as pq

    files = sample_files(folder, step)
    scores = [pq.read_table(file, columns=["score", "prompt_id", "sample"]).to_pylist() for file in files]
    order = [
        (row["score"], row["prompt_id"], row["sample"], file_index, number)
        for file_index, rows in enumerate(scores)
        for number, row in enumerate(rows)
    ]
    order.sort()
    selected = _spread(order, MOST)
    wanted = {
        file_index: [number for *_, source, number in selected if source == file_index]
        for file_index in range(len(files))
    }
    rows = {
        (file_index, number): row
        for file_index, numbers in wanted.items()
        if numbers
        for number, row in zip(numbers, pq.read_table(files[file_index]).take(numbers).to_pylist(), strict=True)
    }
    return [_tracked(rows[file_index, number]) for *_, file_index, number in selected]


def _spread(items: list[T], count: int) -> list[T]:
    """Up to `count` of the items, evenly spaced, the first and the last included.

    >>> _spread(list(range(10)), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= count:
        return items
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _tracked(row: Mapping[str, Any]) -> TrackedSample:
    question = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    messages = json.loads(row["messages"]) if row.get("messages") else question
    messages = worded_messages(messages, () if is_conversation(row) else descriptions(row.get("images")))
    return TrackedSample(
        prompt_id=row["prompt_id"],
        sample=row["sample"],
        score=row["score"],
        outcome=row["outcome"],
        answer=_cut(row["answer"] or ""),
        response_tokens=row["response_tokens"],
        messages=_shortened([{"role": str(message["role"]), "content": _content(message)} for message in messages]),
    )


def _content(message: Mapping[str, Any]) -> str:
    """A message's reasoning, its text and its tool calls in one text, without the role."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    parts = [message.get("reasoning_content"), message.get("content"), *calls]
    texts = [part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts if part]
    return _cut("\n".join(texts))


def _cut(text: str) -> str:
    left_out = len(text) - MESSAGE_CHARACTERS
    shown = printable(redacted(text[:MESSAGE_CHARACTERS]))
    return shown + (f"\n… {left_out} characters more" if left_out > 0 else "")


def _shortened(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    left_out = len(messages) - FIRST_MESSAGES - LAST_MESSAGES
    if left_out <= 0:
        return messages
    gap = {"role": "system", "content": f"… {left_out} messages more"}
    return [*messages[:FIRST_MESSAGES], gap, *messages[-LAST_MESSAGES:]]
