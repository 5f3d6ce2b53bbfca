"""MATH-500: the most often reported part of MATH's test split (Lightman et al., 2023, arXiv:2305.20050)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.math import boxed_prompt
from rlcli_data_prep.sources import SOURCE_HELP, read_all, text

HUB_ID = "HuggingFaceH4/MATH-500"


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    return {"test": read_all(options, HUB_ID, name="math500")}


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    """The ground truth is the column `answer`; `unique_id` distinguishes these rows from others of MATH."""
    return boxed_prompt(
        text(row, "problem"),
        text(row, "answer"),
        HUB_ID,
        text(row, "solution"),
        unique_id=text(row, "unique_id"),
        type=text(row, "subject"),
        level=f"Level {row.get('level')}",
    )


CONVERTER = Converter(
    name="math500",
    summary="MATH-500: 500 test problems of MATH",
    source=HUB_ID,
    verifier="math",
    read=read,
    prompt=prompt,
    options={"source": SOURCE_HELP},
    reference="Lightman et al., 2023, arXiv:2305.20050; MIT",
)
