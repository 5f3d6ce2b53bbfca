"""Selects the prompts of a dataset that a model solves sometimes, by their pass rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.data.prompts.parquet_schema import extra_info_column, unpack_extra_info, write_tables
from rlcli.data.prompts.provenance import recorded, stamped
from rlcli.errors import ConfigError, DataError

PASS_RATE = "pass_rate"


@dataclass(frozen=True, slots=True)
class Keep:
    """The pass rates to keep, both ends included.

    >>> Keep.parse("0.1:0.9", samples=8)
    Keep(low=0.1, high=0.9)
    """

    low: float
    high: float

    @classmethod
    def parse(cls, text: str, samples: int) -> Keep:
        """The range in `text`. Raises `ConfigError` if it is invalid, or contains no pass rate of `samples`."""
        low_text, _, high_text = text.partition(":")
        try:
            low, high = float(low_text), float(high_text)
        except ValueError:
            raise ConfigError(f"--keep = {text} is not LOW:HIGH", "write, for example, 0.1:0.9") from None
        if not 0.0 <= low <= high <= 1.0:
            raise ConfigError(f"--keep = {text} is not a pass-rate range", "give 0 ≤ LOW ≤ HIGH ≤ 1, e.g. 0.1:0.9")
        if not any(low <= passed / samples <= high for passed in range(samples + 1)):
            raise ConfigError(
                f"--keep = {text} keeps nothing: {samples} samples have pass rates that are multiples of 1/{samples}",
                "widen it, or raise --samples",
            )
        return cls(low, high)

    def __contains__(self, rate: object) -> bool:
        return isinstance(rate, float) and self.low <= rate <= self.high


def write_kept(file: Path, target: Path, rates: Mapping[int, float], keep: Keep, record: Mapping[str, Any]) -> int:
    """Write the rows of the parquet `file` whose pass rate is in `keep` to `target`, and return their number.

    rates: row → pass rate, for the scored rows. Each row's `extra_info` gets its `pass_rate`; nothing else changes.
    record: settings of the scoring, added to the file's provenance. If no row is kept, raises `DataError` and writes
    nothing.
    """
    import pyarrow.parquet

    selected = [row for row, rate in sorted(rates.items()) if rate in keep]
    if not selected:
        raise DataError(
            f"no prompt of {file} has a pass rate from {keep.low:g} to {keep.high:g} ({described(rates)})",
            "widen --keep, or use data or a model that fit each other better",
        )
    table = pyarrow.parquet.ParquetFile(file).read().take(selected)
    stored = table["extra_info"].to_pylist() if "extra_info" in table.column_names else [None] * len(selected)
    infos = [{**unpack_extra_info(info), PASS_RATE: rates[row]} for row, info in zip(selected, stored, strict=True)]
    column = extra_info_column(infos)
    if "extra_info" in table.column_names:
        table = table.set_column(table.column_names.index("extra_info"), "extra_info", column)
    else:
        table = table.append_column("extra_info", column)
    provenance = recorded(table.schema.metadata) or {}
    filters = provenance.get("filters")
    earlier = filters if isinstance(filters, list) else []
    write_tables({target: stamped(table, {**provenance, "filters": [*earlier, record]})})
    return len(selected)


def histogram(rates: Mapping[int, float], samples: int) -> dict[str, int]:
    """Number of prompts by pass rate; in tenths if there are more than ten samples.

    >>> histogram({0: 0.0, 1: 0.5, 2: 0.5}, samples=2)
    {'0/2': 1, '1/2': 2, '2/2': 0}
    """
    bins = min(samples, 10)
    counted = [0] * (bins + 1)
    for rate in rates.values():
        # A rate between two bins counts for the nearer one; 0 and 1, which teach nothing, have separate bins.
        near = round(rate * bins)
        counted[near if rate in (0.0, 1.0) else min(max(near, 1), bins - 1)] += 1
    return {f"{number}/{bins}": count for number, count in enumerate(counted)}


def described(rates: Mapping[int, float]) -> str:
    """The pass rates in one line.

    >>> described({0: 0.0, 1: 1.0, 2: 0.5})
    '1 never solved, 1 sometimes, 1 always'
    """
    never, always = (sum(rate == end for rate in rates.values()) for end in (0.0, 1.0))
    return f"{never} never solved, {len(rates) - never - always} sometimes, {always} always"
