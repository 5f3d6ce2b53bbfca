"""DAPO-Math-17k: problems with integer answers (Yu et al., 2025, arXiv:2503.14476)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlcli.errors import DataError
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.chats import chat
from rlcli_data_prep.sources import SOURCE_HELP, read_all, text

HUB_ID = "BytedTsinghua-SIA/DAPO-Math-17k"


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    return {"train": _once(read_all(options, HUB_ID, name="dapo"))}


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    """The prompt is the paper's, unchanged: it asks for a last line "Answer: $Answer"."""
    return Prompt(
        id="",
        messages=chat(row.get("prompt"), "prompt"),
        data_source="math_dapo",
        ability="math",
        verifier="math",
        ground_truth=text(_struct(row, "reward_model"), "ground_truth").strip(),
        extra_info={"answer_format": "answer_line", "uid": text(_struct(row, "extra_info"), "index")},
    )


def _once(rows: Iterable[RawRow]) -> Iterator[RawRow]:
    """Each problem once: the published file repeats each one a hundred times."""
    seen: set[str] = set()
    for row in rows:
        extra = row.values.get("extra_info")
        index = str(extra.get("index")) if isinstance(extra, Mapping) else ""
        if not index or index not in seen:
            seen.add(index)
            yield row


def _struct(row: Mapping[str, Any], column: str) -> Mapping[str, Any]:
    value = row.get(column)
    if not isinstance(value, Mapping):
        raise DataError(f"'{column}' is not a struct: {value!r:.80}", "give the published file, or fix that row")
    return value


CONVERTER = Converter(
    name="dapo-math",
    summary="DAPO-Math-17k: competition problems with integer answers, each once",
    source=HUB_ID,
    verifier="math",
    read=read,
    prompt=prompt,
    options={"source": SOURCE_HELP},
    reference="Yu et al., 2025, arXiv:2503.14476; Apache-2.0",
)
