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
MOST_VALUE = 10_000
"""Characters of an answer, a ground truth or a verifier's detail."""
MOST_TEXT = 200_000
"""Characters of one text in an answer; the rest is left out and counted."""
LISTED = ("score", "outcome", "answer", "response_tokens", "finish_reason", "turns", "left_out", "ground_truth")
KEYS = ("prompt_id", "group", "sample")
OF_GROUP = (*KEYS, *LISTED, "prompt", "response", "parts", "detail", "messages", "images", "ended")
OF_SAMPLE = (
    *OF_GROUP,
    *("prompt_tokens", "verify_s", "version", "newest_version"),
    *("mean_log_prob", "min_log_prob", "perplexity", "turn_rewards"),
)


def group(run: RunData, kind: Kind, step: int, prompt_id: str, number: int | None = None) -> dict[str, Any]:
    """The samples of a prompt in a step, with advantages: the prompt's messages once, and of each sample what it
    `said` after them; `previous` and `next`: prompt and number of the step's neighbouring groups. number: of the group;
    None: the first of this prompt. RlcliError if there are none."""
    places, groups = _places(run, kind, step, prompt_id, number)
    rows = taken(run, kind, step, OF_GROUP, places)
    if not rows:
        raise RlcliError(f"step {step} has no samples of the prompt {prompt_id:.100}", "choose another step or prompt")
    known, tokens = advantages_of(run, kind, step), token_keys(run, kind, step)
    rows.sort(key=lambda row: row["sample"] or 0)
    for row in rows:
        shorten_verdict(row)
    found: dict[str, Any] = {"kind": kind, "step": step, "prompt_id": prompt_id, "group": rows[0]["group"]}
    found["ground_truth"] = rows[0]["ground_truth"]
    for row in rows:
        row["tokens"] = key_of(row) in tokens
        add_training(row, known)
        asked, row["said"] = conversation(row, where_of(kind, step))
        found.setdefault("messages", asked)
        for name in ("messages", "prompt", "response", "images"):
            del row[name]
    previous, following = _neighbours(groups, (prompt_id, rows[0]["group"]))
    return found | {"rows": rows, "previous": previous, "next": following}


def sample(run: RunData, kind: Kind, step: int, prompt_id: str, number: int | None, index: int) -> dict[str, Any]:
    """One sample with all of its columns, the prompt's `messages` and what was `said` after them, its tokens if the run
    keeps them, and the indexes of all samples of its group. number, index: of the group, as in `group`, and in it.
    RlcliError if there is none."""
    places, _ = _places(run, kind, step, prompt_id, number)
    found = taken(run, kind, step, OF_SAMPLE, places)
    row = next((row for row in found if (row["sample"] or 0) == index), None)
    if row is None:
        raise RlcliError(f"step {step} has no sample {index} of the prompt {prompt_id:.100}", "choose another sample")
    add_training(row, advantages_of(run, kind, step))
    shorten_verdict(row)
    row["messages"], row["said"] = conversation(row, where_of(kind, step))
    del row["prompt"], row["response"], row["images"]
    columns = next((one for one in _tokens(run, kind, step) if key_of(one) == key_of(row)), None)
    others = sorted(int(one["sample"] or 0) for one in found)
    return {"kind": kind, "step": step, **row, "samples": others, "token_columns": columns}


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All messages of a row; of older runs, which did not keep them, the last of the prompt and the response."""
    found: Any = None
    if row.get("messages"):
        try:
            found = json.loads(row["messages"])
        except (ValueError, RecursionError):
            found = None
    if isinstance(found, list):
        return [_message(one) for one in found if isinstance(one, dict)]
    return [
        {"role": "user", "content": row.get("prompt") or ""},
        {"role": "assistant", "content": row.get("response") or ""},
    ]


def conversation(
    row: Mapping[str, Any], where: str, most: int = MOST_TEXT
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages of the prompt, and those that followed: the policy drew the last `turns` assistant messages. most:
    characters of a message. Messages with pictures have `images`: their descriptions, each with the place, `where`, at
    which `RunImages` finds it: the prompt that has it, or the step in which an environment showed it (the argument
    `where`)."""
    messages = messages_of(row)
    spoke = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    turns = max(1, int(row.get("turns") or 1))
    begin = spoke[-turns:][0] if spoke else len(messages)
    shown = [one | {"where": row.get("prompt_id")} for one in descriptions(row.get("images"))]
    if is_conversation(row):
        own = {one["digest"] for one in shown}
        for image in (image for message in messages for image in message.get("images", ())):
            image["where"] = row.get("prompt_id") if image["digest"] in own else where
    else:
        for message, images in zip(messages[:begin], shared_out(messages[:begin], shown), strict=True):
            message |= {"images": images} if images else {}
    for message in messages:
        _cut(message, "content", most)
    return messages[:begin], messages[begin:]


def _message(found: Mapping[str, Any]) -> dict[str, Any]:
    content = found.get("content")
    if isinstance(content, list):  # parts, as of the OpenAI format
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(part for part in parts if isinstance(part, str))
    more = {name: found[name] for name in ("name", "tool_calls", "reasoning_content") if found.get(name)}
    more |= {"images": images} if (images := descriptions(found.get("images"))) else {}
    return {"role": str(found.get("role", "")), "content": "" if content is None else str(content), **more}


Group = tuple[str, int]
"""Prompt and number of a group."""


def _places(
    run: RunData, kind: Kind, step: int, prompt_id: str, number: int | None
) -> tuple[list[int], Sequence[Group]]:
    """The rows of a group, and all groups of the step, in the order of the files."""
    groups: list[Group] = [
        (row["prompt_id"] or "", row["group"] or 0) for row in run.rows(step, ("prompt_id", "group"), kind)
    ]
    own = [group for prompt, group in groups if prompt == prompt_id]
    wanted = (prompt_id, min(own, default=0) if number is None else number)
    return [at for at, group in enumerate(groups) if group == wanted], list(dict.fromkeys(groups))


def _neighbours(groups: Sequence[Group], own: Group) -> list[dict[str, Any] | None]:
    """
    >>> _neighbours([("a", 0), ("b", 1)], ("b", 1))
    [{'prompt': 'a', 'group': 0}, None]
    """
    at = groups.index(own)
    beside = (groups[at - 1] if at else None, groups[at + 1] if at + 1 < len(groups) else None)
    return [one and {"prompt": one[0], "group": one[1]} for one in beside]


def taken(run: RunData, kind: Kind, step: int, columns: Sequence[str], places: Sequence[int]) -> list[dict[str, Any]]:
    """The rows at `places` of a step. Rows that are not wanted never become Python objects."""
    rows: list[dict[str, Any]] = run.table(step, columns, kind).take(list(places)).to_pylist() if places else []
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
    """Shorten what a model or a verifier may have made as long as the response."""
    for name in ("answer", "ground_truth", "detail"):
        _cut(row, name, MOST_VALUE)


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


def _cut(row: dict[str, Any], name: str, most: int) -> None:
    """Shorten a text that no page could show, and count what is missing."""
    text = row.get(name) or ""
    if len(text) > most:
        row[name], row[f"{name}_left_out"] = text[:most], len(text) - most
