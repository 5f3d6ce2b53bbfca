"""DeepScaleR: 40 thousand competition problems, mostly AIME, AMC, Omni-MATH and STILL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.math import boxed_prompt
from rlcli_data_prep.sources import SOURCE_HELP, read_all, text

HUB_ID = "agentica-org/DeepScaleR-Preview-Dataset"


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    return {"train": read_all(options, HUB_ID, name="deepscaler")}


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    """The ground truth is the column `answer`; a solution that does not end with it is dropped."""
    solution = row.get("solution")
    worked = solution if isinstance(solution, str) else None
    return boxed_prompt(text(row, "problem"), text(row, "answer"), HUB_ID, worked)


CONVERTER = Converter(
    name="deepscaler",
    summary="DeepScaleR: about 40,000 competition problems, for training",
    source=HUB_ID,
    verifier="math",
    read=read,
    prompt=prompt,
    options={"source": SOURCE_HELP},
    reference="Luo et al., 2025, DeepScaleR; MIT",
)
