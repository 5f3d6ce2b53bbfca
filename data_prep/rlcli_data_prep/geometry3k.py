"""Geometry3K: problems about figures (Lu et al., 2021, arXiv:2105.04165)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.images import asked, images_of
from rlcli_data_prep.sources import SOURCE_HELP, read_splits, text

HUB_ID = "hiyouga/geometry3k"
INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. "
    "The final answer MUST BE put in \\boxed{}."
)
"""The instruction of verl's example."""


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    return read_splits(options, HUB_ID)


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    problem, answer = text(row, "problem").strip(), text(row, "answer").strip()
    images = images_of(row, options, "images", "image")
    return Prompt(
        id="",
        messages=asked(f"{problem} {INSTRUCTION}", images),
        data_source=HUB_ID,
        ability="math",
        verifier="math",
        ground_truth=answer,
        extra_info={"answer_format": "box", "question": problem, "answer": answer},
        images=images,
    )


CONVERTER = Converter(
    name="geometry3k",
    summary="Geometry3K: 2101 + 601 problems about figures",
    source=HUB_ID,
    verifier="math",
    read=read,
    prompt=prompt,
    options={"source": SOURCE_HELP},
    reference="Lu et al., 2021, arXiv:2105.04165",
)
