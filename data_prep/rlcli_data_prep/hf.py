"""Convert any dataset of the Hugging Face hub, by a mapping of its columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep import jsonl
from rlcli_data_prep.sources import read_splits


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    jsonl.check(options)
    return read_splits(options, "")


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    """Like `jsonl`; the data source is the hub id."""
    return jsonl.prompt_of(row, options, str(options.source))


CONVERTER = Converter(
    name="hf",
    summary="Any dataset of the Hugging Face hub, by a mapping of its columns",
    source="--source",
    verifier="--verifier",
    read=read,
    prompt=prompt,
    note=jsonl.note,
    options={
        "source": "the hub id, e.g. openai/gsm8k, or a local copy; required",
        "subset": "the dataset's configuration, if it has several",
        **jsonl.OPTIONS,
    },
)
