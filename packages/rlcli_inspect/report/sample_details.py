"""The samples of a group side by side, and one sample with its conversation and its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlcli.data.sample_files import is_conversation
from rlcli.errors import RlcliError
from rlcli.images.image_descriptions import descriptions, shared_out
from rlcli.runs.run_data import Key, Kind, RunData, add_training, key_of
from rlcli.runs.run_images import where_of

EXCERPT = 280
"""Characters of a prompt or response in a list."""
MAX_VALUE = 10_000
"""Characters of an answer, a ground truth or a verifier's detail."""
MAX_TEXT = 200_000
"""Characters of one text in an answer; the rest is left out and counted."""
LISTED = ("score", "outcome", "answer", "response_tokens", "finish_reason", "turns", "left_out", "ground_truth")
KEYS = ("prompt_id", "group", "sample")
GROUP_COLUMNS = (*KEYS, *LISTED, "prompt", "response", "parts", "detail", "messages", "images", "ended")
SAMPLE_COLUMNS = (
    *GROUP_COLUMNS,
    *("prompt_tokens", "verify_s", "version", "newest_version"),
    *("mean_log_prob", "min_log_prob", "perplexity", "turn_rewards"),
)


def group(run: RunData, kind: Kind, step: int, prompt_id: str, number: int | None = None) -> dict[str, object]:
    """The samples of a prompt in a step, with advantages: the prompt's messages once, and for each sample the messages
    after them (`said`); `previous` and `next`: prompt and number of the step's neighbouring groups. number: of the
    group; None: the first of this prompt. RlcliError if there are none."""
    indices, groups = _indices(run, kind, step, prompt_id, number)
    rows = take(run, kind, step, GROUP_COLUMNS, indices)
    if not rows:
        raise RlcliError(f"step {step} has no samples of the prompt {prompt_id:.100}", "choose another step or prompt")
    known, tokens = advantages_of(run, kind, step), token_keys(run, kind, step)
    rows.sort(key=lambda row: row["sample"] or 0)
    for row in rows:
        shorten_verdict(row)
    result: dict[str, object] = {"kind": kind, "step": step, "prompt_id": prompt_id, "group": rows[0]["group"]}
    result["ground_truth"] = rows[0]["ground_truth"]
    for row in rows:
        row["tokens"] = key_of(row) in tokens
        add_training(row, known)
        prompt_messages, row["said"] = conversation(row, where_of(kind, step))
        result.setdefault("messages", prompt_messages)
        for name in ("messages", "prompt", "response", "images"):
            del row[name]
    previous, following = _neighbours(groups, (prompt_id, rows[0]["group"]))
    return result | {"rows": rows, "previous": previous, "next": following}


def sample(run: RunData, kind: Kind, step: int, prompt_id: str, number: int | None, index: int) -> dict[str, object]:
    """One sample with all of its columns, the prompt's `messages` and what was `said` after them, its tokens if the run
    keeps them, and the indexes of all samples of its group. number, index: of the group, as in `group`, and in it.
    RlcliError if there is none."""
    indices, _ = _indices(run, kind, step, prompt_id, number)
    rows = take(run, kind, step, SAMPLE_COLUMNS, indices)
    row = next((row for row in rows if (row["sample"] or 0) == index), None)
    if row is None:
        raise RlcliError(f"step {step} has no sample {index} of the prompt {prompt_id:.100}", "choose another sample")
    add_training(row, advantages_of(run, kind, step))
    shorten_verdict(row)
    row["messages"], row["said"] = conversation(row, where_of(kind, step))
    del row["prompt"], row["response"], row["images"]
    columns = next((candidate for candidate in _tokens(run, kind, step) if key_of(candidate) == key_of(row)), None)
    others = sorted(int(candidate["sample"] or 0) for candidate in rows)
    return {"kind": kind, "step": step, **row, "samples": others, "token_columns": columns}


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All messages of a row; of older runs, which did not store them, the last one of the prompt and the response."""
    stored: Any = None
    if row.get("messages"):
        try:
            stored = json.loads(row["messages"])
        except (ValueError, RecursionError):
            stored = None
    if isinstance(stored, list):
        return [_message(message) for message in stored if isinstance(message, dict)]
    return [
        {"role": "user", "content": row.get("prompt") or ""},
        {"role": "assistant", "content": row.get("response") or ""},
    ]


def conversation(
    row: Mapping[str, Any], where: str, max_chars: int = MAX_TEXT
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages of the prompt, and those that followed: the policy generated the last `turns` assistant messages.
    most: characters of a message. Messages with images have `images`: their descriptions, each with the place,
    `where`, at which `RunImages` finds it: the prompt that has it, or the step in which an environment showed it (the
    argument `where`)."""
    messages = messages_of(row)
    spoke = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    turns = max(1, int(row.get("turns") or 1))
    begin = spoke[-turns:][0] if spoke else len(messages)
    shown = [description | {"where": row.get("prompt_id")} for description in descriptions(row.get("images"))]
    if is_conversation(row):
        prompt_digests = {description["digest"] for description in shown}
        for image in (image for message in messages for image in message.get("images", ())):
            image["where"] = row.get("prompt_id") if image["digest"] in prompt_digests else where
    else:
        for message, images in zip(messages[:begin], shared_out(messages[:begin], shown), strict=True):
            message |= {"images": images} if images else {}
    for message in messages:
        _cut(message, "content", max_chars)
    return messages[:begin], messages[begin:]


def _message(stored: Mapping[str, Any]) -> dict[str, Any]:
    content = stored.get("content")
    if isinstance(content, list):  # parts, as of the OpenAI format
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(part for part in parts if isinstance(part, str))
    optional = {name: stored[name] for name in ("name", "tool_calls", "reasoning_content") if stored.get(name)}
    optional |= {"images": images} if (images := descriptions(stored.get("images"))) else {}
    return {"role": str(stored.get("role", "")), "content": "" if content is None else str(content), **optional}


Group = tuple[str, int]
"""Prompt and number of a group."""


def _indices(
    run: RunData, kind: Kind, step: int, prompt_id: str, number: int | None
) -> tuple[list[int], Sequence[Group]]:
    """The rows of a group, and all groups of the step, in the order of the files."""
    groups: list[Group] = [
        (row["prompt_id"] or "", row["group"] or 0) for row in run.rows(step, ("prompt_id", "group"), kind)
    ]
    numbers = [group for prompt, group in groups if prompt == prompt_id]
    wanted = (prompt_id, min(numbers, default=0) if number is None else number)
    return [at for at, group in enumerate(groups) if group == wanted], list(dict.fromkeys(groups))


def _neighbours(groups: Sequence[Group], group: Group) -> list[dict[str, object] | None]:
    """The groups before and after a group.

    >>> _neighbours([("a", 0), ("b", 1)], ("b", 1))
    [{'prompt': 'a', 'group': 0}, None]
    """
    at = groups.index(group)
    neighbours = (groups[at - 1] if at else None, groups[at + 1] if at + 1 < len(groups) else None)
    return [neighbour and {"prompt": neighbour[0], "group": neighbour[1]} for neighbour in neighbours]


def take(run: RunData, kind: Kind, step: int, columns: Sequence[str], indices: Sequence[int]) -> list[dict[str, Any]]:
    """The rows at `indices` of a step. Other rows never become Python objects."""
    rows: list[dict[str, Any]] = run.table(step, columns, kind).take(list(indices)).to_pylist() if indices else []
    for row in rows:
        row["group"] = row["group"] or 0
        if "parts" in row:
            row["parts"] = dict(row["parts"] or ())
    return rows


def advantages_of(run: RunData, kind: Kind, step: int) -> dict[Key, dict[str, Any]]:
    return run.advantages(step) if kind == "samples" else {}


def _tokens(run: RunData, kind: Kind, step: int) -> list[dict[str, Any]]:
    return run.tokens(step) if kind == "samples" else []


def token_keys(run: RunData, kind: Kind, step: int) -> set[Key]:
    return run.token_keys(step) if kind == "samples" else set()


def shorten_verdict(row: dict[str, Any]) -> None:
    """Shorten values of a row that may be as long as the response."""
    for name in ("answer", "ground_truth", "detail"):
        _cut(row, name, MAX_VALUE)


def excerpt(text: str | None, around: str = "") -> str:
    """The beginning of a text, or what surrounds the first occurrence of `around`.

    >>> excerpt("a" * 300)[-3:], excerpt("b" * 300 + "Needle", "needle")[-6:]
    ('aa…', 'Needle')
    """
    text = text or ""
    at = text.lower().find(around.lower()) if around else 0
    begin = max(0, at - EXCERPT // 3) if at + len(around) > EXCERPT else 0
    cut = text[begin : begin + EXCERPT]
    return ("…" if begin else "") + cut + ("…" if begin + EXCERPT < len(text) else "")


def short(text: str | None) -> str | None:
    return None if text is None else excerpt(text)


def _cut(row: dict[str, Any], name: str, max_chars: int) -> None:
    """Shorten a text that is too long for a page, and count the missing characters."""
    text = row.get(name) or ""
    if len(text) > max_chars:
        row[name], row[f"{name}_left_out"] = text[:max_chars], len(text) - max_chars
