"""Finds saved samples of a run by a filter, the newest steps first."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.data.sample_files import sample_files
from rlcli.data.step_files import ADVANTAGES
from rlcli.errors import DataError
from rlcli.evaluation.evaluation_folder import read_samples
from rlcli.support.reading import check_regular
from rlcli.types import Outcome

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Filter:
    """Conditions on samples; an empty field or None is no condition."""

    outcomes: tuple[str, ...] = ()
    """The outcome is one of these."""
    wrong: bool = False
    """Any outcome but a correct answer."""
    min_reward: float | None = None
    """Lowest score."""
    max_reward: float | None = None
    """Highest score."""
    prompt: str = ""
    """Id of the prompt."""
    text: str = ""
    """Part of the prompt, the response or another message, ignoring case."""

    def of(self, table: pa.Table) -> pa.Table:
        """The rows of a table of samples that meet all conditions."""
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
            matches = [
                pc.fill_null(pc.match_substring(table[name], self.text, ignore_case=True), False)
                for name in ("prompt", "response", "messages")
            ]
            masks.append(pc.or_(pc.or_(*matches[:2]), matches[2]))
        if not masks:
            return table
        return table.filter(functools.reduce(pc.and_, masks))  # a null counts as false


def wanted_samples(
    folder: Path, steps: Sequence[int], wanted: Filter, on_note: Callable[[str], None] = lambda text: None
) -> Iterator[dict[str, Any]]:
    """The samples of these steps that meet the filter, as rows, the newest step first, with `advantage` (None if it was
    not recorded).

    folder: the run's `samples` or `evaluations`. on_note: receives a line for each file that cannot be read; its
    samples are left out.
    """
    for step in sorted(steps, reverse=True):
        advantages: Callable[[Mapping[str, Any]], float | None] | None = None
        for file in sample_files(folder, step):
            try:
                table = wanted.of(read_samples(file))
            except DataError as error:
                on_note(error.message)
                continue
            if len(table) and advantages is None:
                advantages = _advantages(folder, step)
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


def _advantages(folder: Path, step: int) -> Callable[[Mapping[str, Any]], float | None]:
    """A function from a row of a step to its recorded advantage. Samples with the same key, of a prompt that occurs
    twice in a file without groups, have none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = folder / f"step-{step:06d}" / ADVANTAGES
    try:
        check_regular(file)
        rows = pq.read_table(file).to_pylist()
    except (OSError, pa.ArrowException):  # an older run, or a kill in the middle of a write
        return lambda row: None
    names = [name for name in ("prompt_id", "sample", "group") if rows and name in rows[0]]
    advantages: dict[tuple[Any, ...], float | None] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        advantages[key] = None if key in advantages else row.get("advantage")
    return lambda row: advantages.get(tuple(row.get(name) for name in names))
