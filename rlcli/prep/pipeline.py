"""Turns a dataset's raw rows into prompts: the same filter and check steps for every converter, each counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from rlcli.errors import DataError
from rlcli.images.decoding import decode
from rlcli.images.row_images import BadImage
from rlcli.prep import row_steps
from rlcli.prep.decontaminate import NGRAM, SHARE
from rlcli.prep.row_steps import EXAMPLES, REPORT_EVERY, OnProgress, Outcome, Rows
from rlcli.prep.row_store import Row, RowStore, StoredPrompts, StoredRows
from rlcli.registry import Registry
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow

CONVERTERS: Registry[Converter] = Registry("dataset", "rlcli.data_prep")
"""The datasets that `rlcli prep` knows."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps to apply to the rows of a dataset. None, empty and False skip a step."""

    split: str | None = None
    """The only split to keep."""
    min_chars: int | None = None
    """Least characters of a prompt, all messages together."""
    max_chars: int | None = None
    """Most characters of a prompt, all messages together."""
    max_tokens: int | None = None
    """Most tokens of a prompt, with `tokenizer` and its chat template."""
    tokenizer: str | None = None
    """Folder or hub id of a model."""
    dedup: bool = False
    """Keep the first of equal prompts."""
    against: tuple[str, ...] = ()
    """Evaluation sets (parquet files, or folders with test.parquet) that no train row may match."""
    ngram: int = NGRAM
    """Words of an n-gram (see `decontaminate`)."""
    share: float = SHARE
    """Share of an evaluation prompt's n-grams from which on a train row matches it."""
    shuffle: int | None = None
    """Seed of the order."""
    limit: int | None = None
    """Most rows of a split."""
    check: bool = True
    """Verify each row's own answer."""
    skip_bad: bool = False
    """Leave out a row that is malformed or whose answer fails the check, instead of stopping."""
    test_size: float | None = None
    """Rows of train to hold out as the test split: a number, or a share below 1."""
    test_seed: int = 0
    """Seed that selects the held-out rows."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of a step."""

    name: str
    """Name of the step."""
    rows: dict[str, int]
    """Split → remaining rows."""
    removed: dict[str, int] = field(default_factory=dict)
    """Reason → number of removed rows."""
    examples: list[str] = field(default_factory=list)
    """Descriptions of some removed rows."""
    note: str = ""
    """Further information in one line."""


@dataclass(frozen=True)
class Prepared:
    """The result of preparing a dataset."""

    splits: dict[str, StoredPrompts]
    """Split → its prompts."""
    steps: list[Step]
    """The result of each step."""
    origins: list[str]
    """Origins of the raw rows (see `RawRow.origin`)."""


def converter_named(name: str) -> Converter:
    """The dataset's converter. Raises `UnknownName` with similar names, `RlcliError` if its package does not load, and
    `DataError` if the package publishes something else."""
    converter: object = CONVERTERS.get(name)
    if not isinstance(converter, Converter):
        origin = f"{CONVERTERS.origin(name)}, {CONVERTERS.target(name)}"
        raise DataError(
            f"the dataset '{name}' ({origin}) is a {type(converter).__name__}",
            "its package must publish an rlcli.types.Converter",
        )
    return converter


def prepare(
    converter: Converter,
    options: ConvertOptions,
    plan: Plan | None = None,
    on_progress: OnProgress = lambda activity, steps, total: None,
) -> Prepared:
    """Read, convert, filter and check a dataset, and note rows that repeat others. Raises `DataError` for a malformed
    row, and if no row of a split is left."""
    plan = plan or Plan(check=False)
    rows, steps, origins = _convert(converter, options, plan, on_progress)
    for name, step in _steps(plan, on_progress):
        outcome = step(rows)
        rows = outcome.rows
        remaining = {split: len(split_rows) for split, split_rows in rows.items()}
        steps.append(Step(name, remaining, outcome.removed, outcome.examples, outcome.note))
        for split, split_rows in rows.items():
            if not split_rows:
                raise DataError(
                    f"{converter.name}: no row of the {split} split is left ({_described(steps, split)})",
                    "relax the filters, or take one split with --split",
                )
    if note := row_steps.repeats(rows):
        steps.append(Step("repeats", {split: len(split_rows) for split, split_rows in rows.items()}, note=note))
    return Prepared({split: StoredPrompts(split_rows) for split, split_rows in rows.items()}, steps, origins)


def located(where: str, error: Exception) -> DataError:
    """`error` about a row's values, with the location of the row."""
    if isinstance(error, DataError):
        return DataError(f"{where}: {error.message}", error.hint or "fix that row of the source")
    return DataError(f"{where}: the converter fails on it: {error!r:.200}", "fix that row of the source")


def _steps(plan: Plan, on_progress: OnProgress) -> Iterable[tuple[str, Callable[[Rows], Outcome]]]:
    """The steps that the plan asks for, in order."""
    if plan.min_chars is not None or plan.max_chars is not None:
        yield "length", partial(row_steps.by_chars, low=plan.min_chars, high=plan.max_chars)
    if plan.max_tokens is not None:
        assert plan.tokenizer is not None, "max_tokens without a tokenizer"
        by_tokens = partial(row_steps.by_tokens, max_tokens=plan.max_tokens, tokenizer=plan.tokenizer)
        yield "tokens", partial(by_tokens, on_progress=on_progress)
    if plan.dedup:
        yield "dedup", row_steps.without_duplicates
    if plan.against:
        decontaminated = partial(row_steps.decontaminated, against=plan.against, n=plan.ngram, share=plan.share)
        yield "decontaminate", partial(decontaminated, on_progress=on_progress)
    if plan.test_size is not None:
        yield "hold out", partial(row_steps.held_out, size=plan.test_size, seed=plan.test_seed)
    if plan.shuffle is not None:
        yield "shuffle", partial(row_steps.shuffled, seed=plan.shuffle)
    if plan.limit is not None:
        yield "limit", partial(row_steps.limited, limit=plan.limit)
    if plan.check:
        from rlcli.prep.gold_check import checked

        yield "check", partial(checked, skip_bad=plan.skip_bad, on_progress=on_progress)


def _convert(
    converter: Converter, options: ConvertOptions, plan: Plan, on_progress: OnProgress
) -> tuple[Rows, list[Step], list[str]]:
    raw = converter.read(options)
    if not raw:
        raise DataError(f"{converter.name}: the converter gave no split", "fix the converter, or give another --source")
    if plan.split is not None and plan.split not in raw:
        raise DataError(
            f"--split = {plan.split}: {converter.name} has only {', '.join(raw)}", "give that, or another --source"
        )
    reading, rows = _Reading(converter, options, plan.skip_bad), Rows()
    for split in [plan.split] if plan.split is not None else raw:
        rows[split] = reading.split(split, raw[split], on_progress)
    steps = [Step("read", reading.read)]
    if reading.removed or reading.notes:
        remaining = {split: len(split_rows) for split, split_rows in rows.items()}
        note = "; ".join(f"{count} rows {text}" for text, count in reading.notes.items())
        steps.append(Step("convert", remaining, dict(reading.removed), reading.examples, note))
    return rows, steps, [origin for origin in reading.origins if origin]


class _Reading:
    """Converts raw rows into a store of them. read: raw rows of each split. removed: how many were left out, by reason,
    with examples. notes: how many rows of each note of the converter."""

    def __init__(self, converter: Converter, options: ConvertOptions, skip_bad: bool) -> None:
        self._converter, self._options, self._skip_bad = converter, options, skip_bad
        self._store = RowStore()
        self.read: dict[str, int] = {}
        self.origins: dict[str, None] = {}
        self.removed: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.examples: list[str] = []

    def split(self, split: str, raw: Iterable[RawRow], on_progress: OnProgress) -> StoredRows:
        """The rows of a split. Raises `DataError` if there are none."""
        first = len(self._store)
        for index, raw_row in enumerate(raw):
            self.read[split] = index + 1
            self.origins[raw_row.origin] = None
            self._convert(raw_row, split, index)
            if self.read[split] % REPORT_EVERY == 0:
                on_progress(f"read {split}", self.read[split], None)
        if len(self._store) == first:
            count = self.removed.total()
            defect = "have bad images" if self.removed["bad image"] == count else "are malformed"
            why = f"all {count} rows {defect}, the first: {self.examples[0]}" if count else "it is empty"
            raise DataError(f"{self._converter.name}: no row of the {split} split: {why}", "check the source")
        return StoredRows(self._store, np.arange(first, len(self._store)))

    def _convert(self, raw_row: RawRow, split: str, index: int) -> None:
        try:
            self._store.add(Row(_prompt(self._converter, raw_row, self._options, split, index), raw_row.where))
            if note := self._converter.note(raw_row.values, self._options):
                self.notes[note] += 1
        except BadImage as error:  # datasets of the web have some, which are no reason to stop
            self._leave_out("bad image", f"{raw_row.where}: {error}")
        except DataError as error:
            if not self._skip_bad:
                raise DataError(error.message, f"{error.hint}, or leave such rows out with --skip-bad") from error
            self._leave_out("malformed", error.message)

    def _leave_out(self, why: str, message: str) -> None:
        self.removed[why] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(message)


def _prompt(converter: Converter, raw: RawRow, options: ConvertOptions, split: str, index: int) -> Prompt:
    if raw.problem:
        raise DataError(f"{raw.where}: {raw.problem}", "fix that row of the source")
    try:
        prompt = converter.prompt(raw.values, options)
        for image in prompt.images:
            decode(image)
        json_ready = {"split": split, "index": index, **prompt.extra_info}
        return replace(prompt, id=f"{prompt.data_source}:{split}:{index}", extra_info=json_ready)
    except BadImage:
        raise
    # A short converter just accesses the values that it needs; a row without them is malformed.
    except (DataError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise located(raw.where, error) from error


def _described(steps: list[Step], split: str) -> str:
    """
    >>> _described([Step("read", {"train": 9}), Step("length", {"train": 0})], "train")
    'read: 9, length: 0'
    """
    return ", ".join(f"{step.name}: {step.rows[split]}" for step in steps)


def counts(steps: Iterable[Step]) -> list[dict[str, Any]]:
    """The steps as plain values, for `--json` and the record in the file."""
    return [
        {"step": step.name, "rows": step.rows, "removed": {why: n for why, n in step.removed.items() if n}}
        | ({"note": step.note} if step.note else {})
        for step in steps
    ]
