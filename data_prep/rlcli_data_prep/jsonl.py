"""Convert any local file of rows, by a mapping of its columns."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcli.errors import ConfigError, DataError
from rlcli.images.rows import content_text, marked
from rlcli.types import Converter, ConvertOptions, Message, Prompt, RawRow
from rlcli_data_prep.images import images_of
from rlcli_data_prep.sources import ENDINGS, read_splits, text

OPTIONS = {
    "columns": "our names for its columns, e.g. prompt=question,answer=target (prompt=prompt, and answer=answer, or "
    "else ground_truth); ground_truth also means the answer, images the pictures; any other name goes into extra_info, "
    "response for a worked answer; its other columns are kept there under their own names",
    "verifier": "what scores the rows: a name or an expression (none: named when training, --verifier)",
    "instruction": "text to append to each question, such as the answer format that the verifier reads (none)",
    "data_source": "the rows' name in metrics (the source's own)",
    "ability": "the rows' kind of task (general)",
}


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    """The files' rows; a file whose name gives no split is for training. Raises `ConfigError`."""
    check(options)
    if not Path(str(options.source)).expanduser().exists():
        raise DataError(f"--source: no such file or folder: {options.source}", "for a hub dataset, use: rlcli prep hf")
    return read_splits(options, "")


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    """The question (text or chat messages), the ground truth (text or number, else its JSON; empty if there is neither
    a column for it nor a verifier), and pictures if `columns` names them.

    `extra_info` has the other columns of `columns`, under our name, and those of the source, under its own: a reward
    function that was written for the source finds them.
    """
    columns = dict(options.columns)
    question = _there(row, columns.pop("prompt", "prompt"), "prompt")
    messages = chat(row, question)
    if options.instruction:
        last = messages[-1]
        messages = (*messages[:-1], {**last, "content": f"{last['content']}\n\n{options.instruction}"})
    images: tuple[bytes, ...] = ()
    picture = columns.pop("images", "")
    if picture:
        images = images_of(row, options, _there(row, picture, "images"))
        messages = marked(messages, len(images))
    # `answer` or `ground_truth` names the answer; with both, `answer` is one more column for extra_info.
    answer = columns.pop("ground_truth", "") or columns.pop("answer", "")
    column = answer or _answer_of(row)
    # Without a verifier that reads an answer there may be none: a reward function reads the columns that it needs.
    has_answer = answer or options.verifier or column in row
    truth = _truth(row, _there(row, column, "answer")) if has_answer else ""
    return Prompt(
        id="",
        messages=messages,
        data_source=options.data_source or Path(str(options.source)).name.split(".")[0] or "local",
        ability=options.ability or "general",
        verifier=options.verifier or "",
        ground_truth=truth,
        extra_info=_kept(row, {question, picture}) | {name: _json(row, column) for name, column in columns.items()},
        images=images,
    )


def check(options: ConvertOptions) -> None:
    """Raise `ConfigError` if the source is not given: it cannot be guessed."""
    if not options.source:
        raise ConfigError("--source is not given", "for example: --source rows.jsonl")


def _answer_of(row: Mapping[str, Any]) -> str:
    """The column of the answer, if none is named."""
    return "ground_truth" if "answer" not in row and "ground_truth" in row else "answer"


def _kept(row: Mapping[str, Any], read: Collection[str]) -> dict[str, Any]:
    """The columns of the source but those in `read`, without values that JSON has none for, such as bytes or times."""
    return {str(name): value for name, value in row.items() if name not in read and _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def chat(row: Mapping[str, Any], column: str) -> tuple[Message, ...]:
    """The chat messages in a column: plain text is one user message. Raises `DataError`."""
    value = row.get(column)
    if not isinstance(value, list) or not value:
        return ({"role": "user", "content": text(row, column).strip()},)
    for message in value:
        if not isinstance(message, Mapping):
            raise DataError(f"'{column}' holds no chat message: {message!r:.80}", "give role and content as text")
    return tuple({"role": text(message, "role"), "content": _content(message)} for message in value)


def _content(message: Mapping[str, Any]) -> str:
    """Text, or a list of parts as text with `<image>` markers."""
    parts = message.get("content")
    return (content_text(parts) if isinstance(parts, list) else None) or text(message, "content")


def _there(row: Mapping[str, Any], column: str, ours: str) -> str:
    """`column`. Raises `DataError` if the row lacks it: more likely the mapping is wrong than the row."""
    if column not in row:
        has = ", ".join(map(str, row)) or "nothing"
        raise DataError(f"no column '{column}' (the row has {has})", f"name the column with --columns {ours}=THEIRS")
    return column


def _truth(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # a column of integers with missing values is read as floats
    if value is None or isinstance(value, str):
        return text(row, column).strip()
    return json.dumps(_json({column: value}, column), ensure_ascii=False)


def _json(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise DataError(f"no column '{column}' (the row has {', '.join(map(str, row))})", "fix --columns or that row")
    if not _is_json(row[column]):
        raise DataError(f"'{column}' holds no JSON value: {row[column]!r:.80}", "leave it out, or fix that row")
    return row[column]


CONVERTER = Converter(
    name="jsonl",
    summary=f"Any local file or folder ({', '.join(ENDINGS)}), by a mapping of its columns",
    source="--source",
    verifier="--verifier",
    read=read,
    prompt=prompt,
    options={"source": "the file, or a folder of train and test files; required", **OPTIONS},
)
