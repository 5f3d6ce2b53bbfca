"""GSM8K: grade-school word problems (Cobbe et al., 2021, arXiv:2110.14168)."""

from __future__ import annotations

import re

from rlcli.errors import DataError
from rlcli.types import Converter, ConvertOptions, Prompt
from rlcli_data_prep.sources import Row, read_splits, text_of

HUB_ID, HUB_CONFIG = "openai/gsm8k", "main"
INSTRUCTION = "Reason step by step, and end with the answer as a plain number after ####, like this: #### 42"
COLUMNS = ("question", "answer")
FINAL = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


def convert(options: ConvertOptions) -> dict[str, list[Prompt]]:
    """7473 train and 1319 test rows; the ground truth is the number after `####`, without thousands separators."""
    splits = read_splits(options.source, HUB_ID, HUB_CONFIG)
    return {split: [_prompt(row, split, i) for i, row in enumerate(rows)] for split, rows in splits.items()}


def _prompt(row: Row, split: str, number: int) -> Prompt:
    question, answer = (text_of(row, column, split, number, COLUMNS) for column in COLUMNS)
    final = FINAL.search(answer)
    if final is None:
        raise DataError(
            f"{split}, row {number} (the first is 0): 'answer' does not end in #### and a number: {answer[-60:]!r}",
            "mend that row of the source",
        )
    return Prompt(
        id=f"{HUB_ID}:{split}:{number}",
        messages=({"role": "user", "content": f"{question.strip()}\n\n{INSTRUCTION}"},),
        data_source=HUB_ID,
        ability="math",
        verifier="gsm8k",
        ground_truth=final[1].replace(",", ""),
        extra_info={"split": split, "index": number, "question": question, "answer": answer, "response": answer},
    )


CONVERTER = Converter(
    name="gsm8k",
    summary="GSM8K: 7473 + 1319 grade-school word problems",
    source=HUB_ID,
    verifier="gsm8k",
    convert=convert,
    options={"source": "a local folder or file in place of the hub (.jsonl, .json, .parquet, .gz)"},
)
