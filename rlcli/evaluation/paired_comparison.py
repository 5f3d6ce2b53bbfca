"""Compare two evaluations of the same prompts, matched prompt by prompt, with significance tests."""

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
from rlcli.rollout.rollout_call import GREEDY

if TYPE_CHECKING:
    import numpy as np

MEAN = "mean@1"
"""The mean score: one measure for any number of samples."""
OF_STEP = re.compile(r"(step-(\d+))(\.rank-|$)")


@dataclass(frozen=True)
class Difference:
    """One measure in A and B. difference: B minus A, with a 95% interval by a bootstrap over the pairs. p: p-value of a
    paired permutation test. of_a, of_b: each alone, with its interval."""

    a: float
    b: float
    difference: Estimate
    p: float
    of_a: Estimate
    of_b: Estimate


@dataclass(frozen=True)
class Changed:
    """A prompt, and the share of its samples that passed in A and B."""

    prompt_id: str
    prompt: str
    a: float
    b: float


@dataclass(frozen=True)
class Comparison:
    """The comparison of one dataset. better, worse, same: number of prompts by their pass@1 in B. changed: the prompts
    that differ most."""

    prompts: int
    """In both evaluations; rows that pose the same problem are one prompt."""
    rows: int
    """Of the data, in both."""
    only_a: int
    only_b: int
    measures: Mapping[str, Difference]
    better: int
    worse: int
    same: int
    changed: Sequence[Changed]


@dataclass(frozen=True)
class Compared:
    """a, b: as given by the user. differing: different settings, name → the values in A and B. unmatched: datasets that
    only one of them has."""

    a: str
    b: str
    differing: Mapping[str, tuple[Any, Any]]
    unmatched: Sequence[str]
    overall: Comparison
    datasets: Mapping[str, Comparison]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "a": self.a,
            "b": self.b,
            "differing": {name: {"a": one, "b": other} for name, (one, other) in self.differing.items()},
            "unmatched_datasets": list(self.unmatched),
            **asdict(self.overall),
            "datasets": {name: asdict(comparison) for name, comparison in self.datasets.items()},
        }


@dataclass(frozen=True)
class _Pair:
    """The prompts of a dataset that both have: id and text of each one's first row, and the responses of each, by
    position. rows: of the data."""

    rows: int
    ids: list[str]
    texts: list[str]
    a: Responses
    b: Responses
    only_a: int
    only_b: int


def compare(a: str, b: str, changed: int) -> Compared:
    """Match `a` and `b` (folders of evaluations, parquet files of samples, or `evaluations/step-N` of a run).

    changed: how many of the most changed prompts to list. Raises `DataError` if their datasets or prompts differ.
    """
    one, other = _tables(a), _tables(b)
    pairs: dict[str, _Pair] = {}
    matched = _matched(a, b, one, other)
    for name_a, name_b in matched.items():
        pairs[name_a] = _pair(name_a, a, b, one[name_a], other[name_b])
    comparisons = {name: _compared([pair], changed) for name, pair in pairs.items()}
    whole = _compared(list(pairs.values()), changed) if len(pairs) > 1 else next(iter(comparisons.values()))
    unmatched = sorted({*one} - matched.keys() | {*other} - {*matched.values()})
    return Compared(a, b, _differing(a, b), unmatched, whole, comparisons)


def _tables(path: str) -> dict[str, Any]:
    """Dataset → its samples."""
    import pyarrow as pa

    place = Path(path)
    if place.is_file() and place.suffix == ".parquet":
        return {place.stem: read_samples(place, links=True)}
    step = place.with_suffix("") if place.suffix == ".json" else place
    named = OF_STEP.fullmatch(step.name)
    if named and (shards := sample_files(step.parent, int(named[2]))):
        return {step.name: pa.concat_tables([read_samples(shard) for shard in shards])}
    if place.is_dir():
        files = sorted(place.glob("*.parquet"))
        several = sorted(found[1] for entry in place.iterdir() if (found := OF_STEP.match(entry.name)))
        if several:
            raise DataError(f"{path} holds samples of a run at several steps", f"name one: {place / several[0]}")
        if (place / PARTS).is_dir():
            raise DataError(f"{path} holds an unfinished evaluation", "run the command that started it again")
        if files:
            return {file.stem: read_samples(file) for file in files}
    raise DataError(
        f"{path} holds no samples of an evaluation",
        "give a folder that rlcli eval wrote with --out, a parquet file of samples, or runs/NAME/evaluations/step-N",
    )


def _matched(a: str, b: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, str]:
    """A's datasets → B's, matched by fingerprint, else by name: a name depends on what else was evaluated in the same
    call."""
    if len(one) == len(other) == 1:  # whatever their names: the prompts are compared later
        return dict(zip(one, other, strict=True))
    marks, theirs = _evaluation(a).get("datasets", {}), _evaluation(b).get("datasets", {})
    both = {name: name for name in one if name in other and marks.get(name) == theirs.get(name)}
    left = {mark: name for name, mark in theirs.items() if name in other and name not in both}
    both |= {name: left.pop(marks[name]) for name in one if name not in both and marks.get(name) in left}
    both |= {name: name for name in one if name not in both and name in other and name not in both.values()}
    if not both:
        raise DataError(
            f"{a} and {b} have no dataset in common: {', '.join(one)} ({len(one)}), {', '.join(other)} ({len(other)})",
            "compare evaluations of the same data",
        )
    return both


def _pair(name: str, a: str, b: str, one: Any, other: Any) -> _Pair:
    for path, table in ((a, one), (b, other)):
        if lacking := sum(score is None or not math.isfinite(score) for score in table.column("score").to_pylist()):
            raise DataError(f"{name}: {lacking} samples of {path} have no score", "evaluate again")
    rows, others = _rows(one), _rows(other)
    ids = sorted(rows.keys() & others.keys(), key=prompt_order)
    if not ids:
        raise DataError(
            f"{name}: {a} and {b} have no prompt in common, of {len(rows)} and {len(others)}",
            "compare evaluations of the same data",
        )
    changed = [prompt for prompt in ids if rows[prompt].content != others[prompt].content]
    if changed:
        raise DataError(
            f"{name}: {len(changed)} of {len(ids)} prompts with the same id differ between {b} and {a}, "
            f"such as {changed[0]}",
            "compare evaluations of the same data",
        )
    # Samples that an older version wrote have no problem: each of their rows is a prompt.
    posed = [rows[prompt].problem or others[prompt].problem or prompt for prompt in ids]
    problems = Problems.of(posed)
    places = dict(zip(ids, problems.of_row.tolist(), strict=True))
    first_ids = [ids[row] for row in problems.first_rows]
    return _Pair(
        len(ids),
        first_ids,
        [rows[prompt].text or "" for prompt in first_ids],
        Responses.of_table(one, places),
        Responses.of_table(other, places),
        only_a=_others(rows, {*ids}, posed),
        only_b=_others(others, {*ids}, posed),
    )


def _others(rows: Mapping[str, _Row], paired: Collection[str], posed: Collection[str]) -> int:
    """How many prompts there are in `rows` besides those that the rows `paired` pose."""
    return len({row.problem or prompt for prompt, row in rows.items() if prompt not in paired} - {*posed})


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the data. text: of its prompt, with pictures in words. problem: equal for rows that pose the same one;
    None if the samples have no such column."""

    text: str | None
    truth: str | None
    problem: str | None

    @property
    def content(self) -> tuple[str | None, str | None]:
        return self.text, self.truth


def _rows(table: Any) -> dict[str, _Row]:
    """Prompt id → row, for rows that have a sample."""
    names = ("prompt_id", "sample", "prompt", "ground_truth", "images", "problem")
    columns = (table.column(name).to_pylist() for name in names)
    return {
        name: _Row(text and worded_last(text, descriptions(images)), truth, problem)
        for name, sample, text, truth, images, problem in zip(*columns, strict=True)
        if sample != GREEDY
    }


def _compared(pairs: Sequence[_Pair], changed: int) -> Comparison:
    import numpy as np

    ids = [name for pair in pairs for name in pair.ids]
    texts = [text for pair in pairs for text in pair.texts]
    offsets = [sum(len(pair.ids) for pair in pairs[:number]) for number in range(len(pairs))]
    one, other = joined([pair.a for pair in pairs], offsets), joined([pair.b for pair in pairs], offsets)
    before, after = _named(one, len(ids)), _named(other, len(ids))
    lows, highs = zip(score_bounds(one), score_bounds(other), strict=True)
    bounds = {MEAN: (min(lows), max(highs))}
    measures = {
        name: _difference(before[name], after[name], bounds.get(name, (0.0, 1.0))) for name in before if name in after
    }
    moved = after["pass@1"] - before["pass@1"]
    order = [place for place in np.argsort(-np.abs(moved), kind="stable").tolist() if moved[place]][:changed]
    return Comparison(
        len(ids),
        sum(pair.rows for pair in pairs),
        sum(pair.only_a for pair in pairs),
        sum(pair.only_b for pair in pairs),
        measures,
        better=int((moved > 0).sum()),
        worse=int((moved < 0).sum()),
        same=int((moved == 0).sum()),
        changed=[
            Changed(ids[place], texts[place], float(before["pass@1"][place]), float(after["pass@1"][place]))
            for place in order
        ],
    )


def _named(responses: Responses, prompts: int) -> dict[str, np.ndarray]:
    """The values of each measure. The mean score is one measure for any number of samples."""
    values, _ = values_of(responses, prompts)
    return {MEAN if name.startswith("mean@") else name: array for name, array in values.items()}


def _difference(before: np.ndarray, after: np.ndarray, bounds: tuple[float, float]) -> Difference:
    moved, span = after - before, bounds[1] - bounds[0]
    return Difference(
        float(before.mean()),
        float(after.mean()),
        interval(moved, bounds=(-span, span)),
        sign_flip(moved),
        interval(before, bounds=bounds),
        interval(after, bounds=bounds),
    )


def _differing(a: str, b: str) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, if both record them."""
    one, other = (_evaluation(path).get("settings", {}) for path in (a, b))
    names = {**one, **other} if one and other else {}
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def _evaluation(path: str) -> dict[str, Any]:
    """The contents of evaluation.json of a folder; empty for anything else."""
    return settings_of(Path(path)) if Path(path).is_dir() else {}
