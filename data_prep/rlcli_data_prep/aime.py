"""AIME: the American Invitational Mathematics Examination, both papers of a year; answers are integers up to 999."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from rlcli.errors import ConfigError, DataError
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.math import boxed_prompt
from rlcli_data_prep.sources import SOURCE_HELP, first, read_all, text

HUB_IDS = {"2024": "Maxwell-Jia/AIME_2024", "2025": "math-ai/aime25"}

# Some copies write an angle's degrees (336^\circ) or leading zeros, as the answer sheet does.
_INTEGER = re.compile(r"\$?(\d{1,3})(?:\^\{?\\circ\}?)?\$?")


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    """The problems of one year (`subset`) or of both, all in the test split."""
    year, all_years = options.subset, replace(options, subset=None)
    if options.source:
        return {"test": _dated(read_all(all_years, "", name="aime", join=True), year)}
    if year and year not in HUB_IDS:
        raise ConfigError(f"--subset = {year}: no such year", f"give {' or '.join(HUB_IDS)}, or a --source that has it")
    papers = [
        _dated(read_all(all_years, HUB_IDS[paper], name="aime"), paper) for paper in ([year] if year else HUB_IDS)
    ]
    return {"test": chain.from_iterable(papers)}


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    problem = text(row, "question", "problem", "Problem")
    column, value = first(row, "answer", "Answer")
    integral = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    integer = _INTEGER.fullmatch(str(int(value)) if integral else str(value).strip())
    if integer is None:
        raise DataError(f"'{column}' is not an integer from 0 to 999: {value!r:.80}", "fix that row of the source")
    year = row.get("year")
    return boxed_prompt(problem, str(int(integer[1])), f"aime{year}" if isinstance(year, int | str) else "aime")


def _dated(rows: Iterator[RawRow], year: str | None) -> Iterator[RawRow]:
    """The rows with the given year, else with the year that they hold."""
    return (replace(row, values={**row.values, "year": year}) for row in rows) if year else rows


CONVERTER = Converter(
    name="aime",
    summary="AIME 2024 and 2025: 30 problems each, for testing",
    source=" + ".join(HUB_IDS.values()),
    verifier="math",
    read=read,
    prompt=prompt,
    options={"source": SOURCE_HELP, "subset": "the year, 2024 or 2025 (both)"},
    reference="Mathematical Association of America; the problems are the MAA's",
)
