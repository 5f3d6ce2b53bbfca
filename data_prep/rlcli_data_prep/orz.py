"""Open-Reasoner-Zero: 57 thousand mathematical problems (Hu et al., 2025, arXiv:2503.24290)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.errors import DataError
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.math import boxed_prompt
from rlcli_data_prep.sources import SOURCE_HELP, read_all, text

HUB_ID = "Open-Reasoner-Zero/orz_math_57k_collection"


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    return {"train": read_all(options, HUB_ID, name="orz")}


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    """A row is a list of two turns, hence the columns "0" (the human's) and "1" (with the assistant's ground truth)."""
    human, assistant = row.get("0"), row.get("1")
    truth = assistant.get("ground_truth") if isinstance(assistant, Mapping) else None
    if not isinstance(human, Mapping) or not isinstance(truth, Mapping):
        raise DataError(
            f"not a pair of a human's turn and an assistant's with a ground truth: {dict(row)!r:.120}",
            "give the published file, or fix that row",
        )
    return boxed_prompt(text(human, "value"), text(truth, "value"), HUB_ID)


CONVERTER = Converter(
    name="orz",
    summary="Open-Reasoner-Zero: about 57,000 mathematical problems, for training",
    source=HUB_ID,
    verifier="math",
    read=read,
    prompt=prompt,
    options={"source": SOURCE_HELP},
    reference="Hu et al., 2025, arXiv:2503.24290; MIT",
)
