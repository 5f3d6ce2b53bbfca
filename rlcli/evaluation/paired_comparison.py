"""Compares two evaluations of the same prompts, matched prompt by prompt, with significance tests."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.data.sample_files import sample_files
from rlcli.errors import DataError
from rlcli.evaluation.equal_problems import Problems
from rlcli.evaluation.evaluation_folder import PARTS, prompt_order, read_samples, settings_of
from rlcli.evaluation.evaluation_report import score_bounds, values_of
from rlcli.evaluation.responses import Responses, joined
from rlcli.evaluation.statistics import Estimate, interval, sign_flip
from rlcli.images.image_descriptions import descriptions, worded_last
from rlcli.rollout.rollout_arguments import GREEDY

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from jaxtyping import Float64

MEAN = "mean@1"
"""The mean score: one measure for any number of samples."""
OF_STEP = re.compile(r"(step-(\d+))(\.rank-|$)")


@dataclass(frozen=True)
class Difference:
    """One measure in A and B."""

    a: float
    """Mean in A."""
    b: float
    """Mean in B."""
    difference: Estimate
    """B minus A, with a 95% interval by a bootstrap over the pairs."""
    p: float
    """p-value of a paired permutation test."""
    of_a: Estimate
    """A alone, with its interval."""
    of_b: Estimate
    """B alone, with its interval."""


@dataclass(frozen=True)
class Changed:
    """A prompt with another pass rate in B than in A."""

    prompt_id: str
    """Dataset, split and row."""
    prompt: str
    """Text of the prompt."""
    a: float
    """Share of its samples that passed in A."""
    b: float
    """Share of its samples that passed in B."""


@dataclass(frozen=True)
class DatasetComparison:
    """The comparison of one dataset."""

    prompts: int
    """Prompts in both evaluations; rows that pose the same problem are one prompt."""
    rows: int
    """Rows of the data in both evaluations."""
    only_a: int
    """Prompts in A alone."""
    only_b: int
    """Prompts in B alone."""
    measures: Mapping[str, Difference]
    """Name → values in A and B, and their difference."""
    better: int
    """Prompts whose pass@1 is higher in B."""
    worse: int
    """Prompts whose pass@1 is lower in B."""
    same: int
    """Prompts whose pass@1 is equal."""
    changed: Sequence[Changed]
    """The prompts that differ most."""


@dataclass(frozen=True)
class EvaluationComparison:
    """The comparison of two evaluations."""

    a: str
    """Path of A, as the user wrote it."""
    b: str
    """Path of B, as the user wrote it."""
    differing: Mapping[str, tuple[object, object]]
    """Setting → different values in A and B."""
    unmatched: Sequence[str]
    """Datasets that only one of them has."""
    overall: DatasetComparison
    """All datasets together."""
    datasets: Mapping[str, DatasetComparison]
    """Dataset → its comparison."""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "a": self.a,
            "b": self.b,
            "differing": {name: {"a": value_a, "b": value_b} for name, (value_a, value_b) in self.differing.items()},
            "unmatched_datasets": list(self.unmatched),
            **asdict(self.overall),
            "datasets": {name: asdict(comparison) for name, comparison in self.datasets.items()},
        }


@dataclass(frozen=True)
class _Pair:
    """The prompts of a dataset that both evaluations have."""

    rows: int
    """Rows of the data."""
    ids: list[str]
    """Id of each prompt's first row."""
    texts: list[str]
    """Text of each prompt's first row."""
    a: Responses
    """Responses in A; their prompts are positions in `ids`."""
    b: Responses
    """Responses in B."""
    only_a: int
    """Prompts in A alone."""
    only_b: int
    """Prompts in B alone."""


def compare(a: str, b: str, changed: int) -> EvaluationComparison:
    """Match `a` and `b` (folders of evaluations, parquet files of samples, or `evaluations/step-N` of a run).

    changed: number of the most changed prompts to list. Raises `DataError` if their datasets or prompts differ.
    """
    tables_a, tables_b = _tables(a), _tables(b)
    pairs: dict[str, _Pair] = {}
    matched = _matched(a, b, tables_a, tables_b)
    for name_a, name_b in matched.items():
        pairs[name_a] = _pair(name_a, a, b, tables_a[name_a], tables_b[name_b])
    comparisons = {name: _compared([pair], changed) for name, pair in pairs.items()}
    overall = _compared(list(pairs.values()), changed) if len(pairs) > 1 else next(iter(comparisons.values()))
    unmatched = sorted({*tables_a} - matched.keys() | {*tables_b} - {*matched.values()})
    return EvaluationComparison(a, b, _differing(a, b), unmatched, overall, comparisons)


def _tables(path: str) -> dict[str, pa.Table]:
    """Dataset → its samples."""
    import pyarrow as pa

    location = Path(path)
    if location.is_file() and location.suffix == ".parquet":
        return {location.stem: read_samples(location, links=True)}
    step = location.with_suffix("") if location.suffix == ".json" else location
    name = OF_STEP.fullmatch(step.name)
    if name and (shards := sample_files(step.parent, int(name[2]))):
        return {step.name: pa.concat_tables([read_samples(shard) for shard in shards])}
    if location.is_dir():
        files = sorted(location.glob("*.parquet"))
        several = sorted(match[1] for entry in location.iterdir() if (match := OF_STEP.match(entry.name)))
        if several:
            raise DataError(f"{path} holds samples of a run at several steps", f"name one: {location / several[0]}")
        if (location / PARTS).is_dir():
            raise DataError(f"{path} holds an unfinished evaluation", "run the command that started it again")
        if files:
            return {file.stem: read_samples(file) for file in files}
    raise DataError(
        f"{path} holds no samples of an evaluation",
        "give a folder that rlcli eval wrote with --out, a parquet file of samples, or runs/NAME/evaluations/step-N",
    )


def _matched(a: str, b: str, tables_a: Mapping[str, pa.Table], tables_b: Mapping[str, pa.Table]) -> dict[str, str]:
    """A's datasets → B's, matched by fingerprint, else by name: a name depends on the other datasets of the same
    call."""
    if len(tables_a) == len(tables_b) == 1:  # with any names: the prompts are compared later
        return dict(zip(tables_a, tables_b, strict=True))
    marks_a, marks_b = _evaluation(a).get("datasets", {}), _evaluation(b).get("datasets", {})
    matches = {name: name for name in tables_a if name in tables_b and marks_a.get(name) == marks_b.get(name)}
    unmatched = {mark: name for name, mark in marks_b.items() if name in tables_b and name not in matches}
    matches |= {
        name: unmatched.pop(marks_a[name])
        for name in tables_a
        if name not in matches and marks_a.get(name) in unmatched
    }
    matches |= {
        name: name for name in tables_a if name not in matches and name in tables_b and name not in matches.values()
    }
    if not matches:
        raise DataError(
            f"{a} and {b} have no dataset in common: {', '.join(tables_a)} ({len(tables_a)}), "
            f"{', '.join(tables_b)} ({len(tables_b)})",
            "compare evaluations of the same data",
        )
    return matches


def _pair(name: str, a: str, b: str, table_a: pa.Table, table_b: pa.Table) -> _Pair:
    for path, table in ((a, table_a), (b, table_b)):
        if lacking := sum(score is None or not math.isfinite(score) for score in table.column("score").to_pylist()):
            raise DataError(f"{name}: {lacking} samples of {path} have no score", "evaluate again")
    rows_a, rows_b = _rows(table_a), _rows(table_b)
    ids = sorted(rows_a.keys() & rows_b.keys(), key=prompt_order)
    if not ids:
        raise DataError(
            f"{name}: {a} and {b} have no prompt in common, of {len(rows_a)} and {len(rows_b)}",
            "compare evaluations of the same data",
        )
    changed = [prompt for prompt in ids if rows_a[prompt].content != rows_b[prompt].content]
    if changed:
        raise DataError(
            f"{name}: {len(changed)} of {len(ids)} prompts with the same id differ between {b} and {a}, "
            f"such as {changed[0]}",
            "compare evaluations of the same data",
        )
    # Samples that an older version wrote have no problem: each of their rows is a prompt.
    problem_texts = [rows_a[prompt].problem or rows_b[prompt].problem or prompt for prompt in ids]
    problems = Problems.of(problem_texts)
    positions = dict(zip(ids, problems.of_row.tolist(), strict=True))
    first_ids = [ids[row] for row in problems.first_rows]
    return _Pair(
        len(ids),
        first_ids,
        [rows_a[prompt].text or "" for prompt in first_ids],
        Responses.of_table(table_a, positions),
        Responses.of_table(table_b, positions),
        only_a=_unpaired(rows_a, {*ids}, problem_texts),
        only_b=_unpaired(rows_b, {*ids}, problem_texts),
    )


def _unpaired(rows: Mapping[str, _Row], paired: Collection[str], problems: Collection[str]) -> int:
    """Number of prompts in `rows` besides those of the rows `paired`."""
    return len({row.problem or prompt for prompt, row in rows.items() if prompt not in paired} - {*problems})


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the data."""

    text: str | None
    """Its prompt, with images in words."""
    truth: str | None
    """Its ground truth."""
    problem: str | None
    """Equal for rows that pose the same problem; None if the samples have no such column."""

    @property
    def content(self) -> tuple[str | None, str | None]:
        return self.text, self.truth


def _rows(table: pa.Table) -> dict[str, _Row]:
    """Prompt id → row, for rows that have a sample."""
    names = ("prompt_id", "sample", "prompt", "ground_truth", "images", "problem")
    columns = (table.column(name).to_pylist() for name in names)
    return {
        name: _Row(text and worded_last(text, descriptions(images)), truth, problem)
        for name, sample, text, truth, images, problem in zip(*columns, strict=True)
        if sample != GREEDY
    }


def _compared(pairs: Sequence[_Pair], changed: int) -> DatasetComparison:
    import numpy as np

    ids = [name for pair in pairs for name in pair.ids]
    texts = [text for pair in pairs for text in pair.texts]
    offsets = [sum(len(pair.ids) for pair in pairs[:number]) for number in range(len(pairs))]
    responses_a, responses_b = joined([pair.a for pair in pairs], offsets), joined([pair.b for pair in pairs], offsets)
    values_a, values_b = _values_by_measure(responses_a, len(ids)), _values_by_measure(responses_b, len(ids))
    lows, highs = zip(score_bounds(responses_a), score_bounds(responses_b), strict=True)
    bounds = {MEAN: (min(lows), max(highs))}
    measures = {
        name: _difference(values_a[name], values_b[name], bounds.get(name, (0.0, 1.0)))
        for name in values_a
        if name in values_b
    }
    change = values_b["pass@1"] - values_a["pass@1"]
    order = [index for index in np.argsort(-np.abs(change), kind="stable").tolist() if change[index]][:changed]
    return DatasetComparison(
        len(ids),
        sum(pair.rows for pair in pairs),
        sum(pair.only_a for pair in pairs),
        sum(pair.only_b for pair in pairs),
        measures,
        better=int((change > 0).sum()),
        worse=int((change < 0).sum()),
        same=int((change == 0).sum()),
        changed=[
            Changed(ids[index], texts[index], float(values_a["pass@1"][index]), float(values_b["pass@1"][index]))
            for index in order
        ],
    )


def _values_by_measure(responses: Responses, prompts: int) -> dict[str, Float64[np.ndarray, " prompts"]]:
    """The values of each measure. The mean score is one measure for any number of samples."""
    values, _ = values_of(responses, prompts)
    return {MEAN if name.startswith("mean@") else name: array for name, array in values.items()}


def _difference(
    values_a: Float64[np.ndarray, " prompts"], values_b: Float64[np.ndarray, " prompts"], bounds: tuple[float, float]
) -> Difference:
    change, span = values_b - values_a, bounds[1] - bounds[0]
    return Difference(
        float(values_a.mean()),
        float(values_b.mean()),
        interval(change, bounds=(-span, span)),
        sign_flip(change),
        interval(values_a, bounds=bounds),
        interval(values_b, bounds=bounds),
    )


def _differing(a: str, b: str) -> dict[str, tuple[object, object]]:
    """The settings that differ, if both record them."""
    settings_a, settings_b = (_evaluation(path).get("settings", {}) for path in (a, b))
    names = {**settings_a, **settings_b} if settings_a and settings_b else {}
    return {
        name: (settings_a.get(name), settings_b.get(name))
        for name in names
        if settings_a.get(name) != settings_b.get(name)
    }


def _evaluation(path: str) -> dict[str, Any]:
    """The contents of evaluation.json of a folder; empty for anything else."""
    return settings_of(Path(path)) if Path(path).is_dir() else {}
