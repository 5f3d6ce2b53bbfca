"""Counting the objects of CLEVR (Johnson et al., 2017, arXiv:1612.06890), as R1-V and open-r1-multimodal do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from rlcli.errors import ConfigError, DataError
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.images import asked, images_of
from rlcli_data_prep.sources import SOURCE_HELP, read_all, text

HUB_ID = "leonardPKU/clevr_cogen_a_train"
INSTRUCTION = "Output the thinking process in <think> </think> and final answer (number) in <answer> </answer> tags."
TEST_ROWS = 500
_ANSWER = re.compile(r"<answer>\s*(\d+)\s*</answer>")


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    """The source has one split: its first rows are for testing."""
    held_out = TEST_ROWS if options.test_count is None else options.test_count
    if held_out < 0 or (options.count is not None and options.count < 1):
        raise ConfigError(f"--count = {options.count}, --test-count = {held_out}: too few", "give 1 or more of each")
    end = None if options.count is None else held_out + options.count
    parts = {"train": (held_out, end), "test": (0, held_out)}
    return {
        split: islice(read_all(options, HUB_ID, name="clevr", join=True), start, stop)
        for split, (start, stop) in parts.items()
        if stop != 0
    }


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    problem, solution = text(row, "problem").strip(), text(row, "solution")
    match = _ANSWER.search(solution)
    if match is None:
        raise DataError(f"'solution' is no number in <answer>: {solution[:60]!r}", "fix that row of the source")
    images = images_of(row, options, "image", "images")
    return Prompt(
        id="",
        messages=asked(f"{problem} {INSTRUCTION}", images),
        data_source=HUB_ID,
        ability="counting",
        verifier="exact",
        ground_truth=match[1],
        extra_info={"answer_format": "tag", "question": problem},
        images=images,
    )


CONVERTER = Converter(
    name="clevr_count",
    summary="CLEVR: how many objects a scene has, 70,000 scenes",
    source=HUB_ID,
    verifier="exact",
    read=read,
    prompt=prompt,
    options={
        "source": SOURCE_HELP,
        "count": "rows of the train split (all)",
        "test_count": f"rows of the test split, the first of the source, held out ({TEST_ROWS})",
    },
    reference="Johnson et al., 2017, arXiv:1612.06890",
)
