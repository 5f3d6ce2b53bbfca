"""Convert any local file of rows, by a mapping of its columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcli.errors import ConfigError, DataError
from rlcli.images.rows import content_text, marked
from rlcli.types import Converter, ConvertOptions, Message, Prompt, RawRow
from rlcli_data_prep.images import images_of
from rlcli_data_prep.sources import ENDINGS, read_splits, text

OPTIONS = {
    "columns": "our names for its columns, e.g. prompt=question,answer=target (prompt=prompt,answer=answer); "
    "ground_truth also means the answer, images the pictures; any other name goes into extra_info, response "
    "for a worked answer",
    "verifier": "what scores the rows: a name or an expression; required",
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
    """The question (text or chat messages), the ground truth (text or number, else its JSON), pictures if `columns`
    names them, and in `extra_info` the other columns of `columns`, under our name."""
    columns = dict(options.columns)
    messages = chat(row, _there(row, columns.pop("prompt", "prompt"), "prompt"))
    if options.instruction:
        last = messages[-1]
        messages = (*messages[:-1], {**last, "content": f"{last['content']}\n\n{options.instruction}"})
    images: tuple[bytes, ...] = ()
    if there := columns.pop("images", ""):
        images = images_of(row, options, _there(row, there, "images"))
        messages = marked(messages, len(images))
    # `answer` or `ground_truth` names the answer; with both, `answer` is one more column for extra_info.
    truth = _truth(row, _there(row, columns.pop("ground_truth", "") or columns.pop("answer", "answer"), "answer"))
    return Prompt(
        id="",
        messages=messages,
        data_source=options.data_source or Path(str(options.source)).name.split(".")[0] or "local",
        ability=options.ability or "general",
        verifier=options.verifier or "",
        ground_truth=truth,
        extra_info={name: _json(row, column) for name, column in columns.items()},
        images=images,
    )


def check(options: ConvertOptions) -> None:
    """Raise `ConfigError` if the source or the verifier is not given: neither can be guessed."""
    for flag, value, example in (
        ("--source", options.source, "--source rows.jsonl"),
        ("--verifier", options.verifier, "--verifier math"),
    ):
        if not value:
            raise ConfigError(
                f"{flag} is not given", f"for example: {example}; rlcli verifiers list shows the verifiers"
            )


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
    try:
        json.dumps(row[column], allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise DataError(
            f"'{column}' holds no JSON value: {row[column]!r:.80}", "leave it out, or fix that row"
        ) from None
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
