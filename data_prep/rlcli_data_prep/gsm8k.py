"""GSM8K: grade-school word problems (Cobbe et al., 2021, arXiv:2110.14168)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.errors import DataError
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.sources import SOURCE_HELP, read_splits, text

HUB_ID, HUB_CONFIG = "openai/gsm8k", "main"
INSTRUCTION = "Reason step by step, and end with the answer as a plain number after ####, like this: #### 42"
FINAL = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    return read_splits(options, HUB_ID, HUB_CONFIG)


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    """The ground truth is the number after `####`, without thousands separators."""
    question, answer = text(row, "question"), text(row, "answer")
    final = FINAL.search(answer)
    if final is None:
        raise DataError(f"'answer' does not end in #### and a number: {answer[-60:]!r}", "fix that row of the source")
    return Prompt(
        id="",
        messages=({"role": "user", "content": f"{question.strip()}\n\n{INSTRUCTION}"},),
        data_source=HUB_ID,
        ability="math",
        verifier="gsm8k",
        ground_truth=final[1].replace(",", ""),
        extra_info={"question": question, "answer": answer, "response": answer},
    )


CONVERTER = Converter(
    name="gsm8k",
    summary="GSM8K: 7473 + 1319 grade-school word problems",
    source=HUB_ID,
    verifier="gsm8k",
    read=read,
    prompt=prompt,
    options={"source": SOURCE_HELP},
    reference="Cobbe et al., 2021, arXiv:2110.14168; MIT",
)
