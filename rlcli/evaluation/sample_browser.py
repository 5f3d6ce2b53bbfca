"""Finds saved samples of a run: the newest steps first, those that a filter wants."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.data.sample_files import sample_files
from rlcli.data.step_files import ADVANTAGES
from rlcli.errors import DataError
from rlcli.evaluation.evaluation_folder import read_samples
from rlcli.support.reading import check_regular
from rlcli.types import Outcome


@dataclass(frozen=True)
class Filter:
    """Which samples are wanted; fields that are empty or None want all. outcomes: one of these. wrong: any outcome but
    a right answer. prompt: its id. text: in the prompt, the response or another message, in any case of letters."""

    outcomes: tuple[str, ...] = ()
    wrong: bool = False
    min_reward: float | None = None
    max_reward: float | None = None
    prompt: str = ""
    text: str = ""

    def of(self, table: Any) -> Any:
        """The wanted rows of a table of samples."""
        import pyarrow as pa
        import pyarrow.compute as pc

        masks = []
        if self.outcomes:
            masks.append(pc.is_in(table["outcome"], value_set=pa.array(self.outcomes)))
        if self.wrong:
            masks.append(pc.not_equal(table["outcome"], str(Outcome.OK)))
        if self.min_reward is not None:
            masks.append(pc.greater_equal(table["score"], self.min_reward))
        if self.max_reward is not None:
            masks.append(pc.less_equal(table["score"], self.max_reward))
        if self.prompt:
            masks.append(pc.equal(table["prompt_id"], self.prompt))
        if self.text:
            found = [
                pc.fill_null(pc.match_substring(table[name], self.text, ignore_case=True), False)
                for name in ("prompt", "response", "messages")
            ]
            masks.append(pc.or_(pc.or_(*found[:2]), found[2]))
        if not masks:
            return table
        return table.filter(functools.reduce(pc.and_, masks))  # a null counts as false


def wanted_samples(
    room: Path, steps: Sequence[int], wanted: Filter, on_note: Callable[[str], None] = lambda text: None
) -> Iterator[dict[str, Any]]:
    """The wanted samples of these steps as rows, the newest step first, with `advantage` (None if it was not recorded).

    room: the run's `samples` or `evaluations` folder. on_note: receives which files cannot be read; their samples are
    left out.
    """
    for step in sorted(steps, reverse=True):
        advantages: Callable[[Mapping[str, Any]], float | None] | None = None
        for file in sample_files(room, step):
            try:
                table = wanted.of(read_samples(file))
            except DataError as error:
                on_note(error.message)
                continue
            if len(table) and advantages is None:
                advantages = _advantages(room, step)
            for row in table.to_pylist():
                yield row | {"step": step, "advantage": advantages(row) if advantages else None}


def one_of_each_group(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of each step in another order: the first one of each group, then the second ones, and so on."""
    for _, of_step in itertools.groupby(rows, key=operator.itemgetter("step")):
        seen = Counter[Any]()
        ranked = []
        for row in of_step:
            group = row["prompt_id"] if row.get("group") is None else row["group"]
            ranked.append((seen[group], row))
            seen[group] += 1
        yield from (row for _, row in sorted(ranked, key=operator.itemgetter(0)))


def _advantages(room: Path, step: int) -> Callable[[Mapping[str, Any]], float | None]:
    """The recorded advantage of a row of a step. Samples that cannot be told apart, of a prompt that occurs twice in a
    file without groups, have none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = room / f"step-{step:06d}" / ADVANTAGES
    try:
        check_regular(file)
        rows = pq.read_table(file).to_pylist()
    except (OSError, pa.ArrowException):  # an older run, or a kill in the middle of a write
        return lambda row: None
    names = [name for name in ("prompt_id", "sample", "group") if rows and name in rows[0]]
    found: dict[tuple[Any, ...], float | None] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        found[key] = None if key in found else row.get("advantage")
    return lambda row: found.get(tuple(row.get(name) for name in names))
