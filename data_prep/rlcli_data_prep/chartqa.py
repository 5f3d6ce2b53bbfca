"""ChartQA: questions about charts (Masry et al., 2022, arXiv:2203.10244)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.errors import DataError
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.images import asked, images_of
from rlcli_data_prep.sources import SOURCE_HELP, first, read_splits, text

HUB_ID = "HuggingFaceM4/ChartQA"
INSTRUCTION = "Think step by step, then give the final answer, a word or a number, in <answer> </answer> tags."


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    return read_splits(options, HUB_ID)


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    """The label is the only answer, or a list of one."""
    question, (column, label) = text(row, "query", "question").strip(), first(row, "label", "answer")
    if isinstance(label, list) and len(label) != 1:
        raise DataError(f"'{column}' is not one answer: {label!r:.80}", "fix that row of the source")
    label = text({column: label[0] if isinstance(label, list) else label}, column)
    images = images_of(row, options, "image", "images")
    return Prompt(
        id="",
        messages=asked(f"{question}\n\n{INSTRUCTION}", images),
        data_source=HUB_ID,
        ability="charts",
        verifier="relaxed",
        ground_truth=label.strip(),
        extra_info={"question": question},
        images=images,
    )


CONVERTER = Converter(
    name="chartqa",
    summary="ChartQA: 28,299 + 2500 questions about charts",
    source=HUB_ID,
    verifier="relaxed",
    read=read,
    prompt=prompt,
    options={"source": SOURCE_HELP},
    reference="Masry et al., 2022, arXiv:2203.10244",
)
