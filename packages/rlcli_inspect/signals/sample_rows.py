"""Reads a bounded part of a run's saved samples: some rows of some steps, selected deterministically."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from rlcli.data.sample_files import sample_files
from rlcli.errors import DataError
from rlcli.evaluation.evaluation_folder import read_samples
from rlcli.evaluation.rescoring import RESCORED
from rlcli.support.reading import json_objects
from rlcli.types import UNVERIFIED

MAX_ROWS = 128
"""Rows of a step: whole groups, in the order of the files."""
MAX_STEPS = 64
"""Steps of a run: the first and the last quarter of them consecutive, the others evenly between them."""
COLUMNS = (
    *("prompt_id", "group", "sample", "prompt", "response", "ground_truth", "score", "outcome"),
    *("response_tokens", "turns", "left_out"),
)

_STEP = re.compile(r"step-(\d+)")


class Row(TypedDict):
    """A saved sample with a verdict. Files of older versions lack columns, whose values are then None."""

    prompt_id: str | None
    """Id of the prompt."""
    group: int | None
    """Group of the step."""
    sample: int | None
    """Index in the group; negative: a greedy baseline."""
    prompt: str | None
    """Text of the prompt."""
    response: str | None
    """Text of the response; of a conversation, of its last turn."""
    ground_truth: str | None
    """Ground truth of the prompt."""
    score: float
    """Score of the verification."""
    outcome: str | None
    """Outcome of the verification."""
    response_tokens: int | None
    """Tokens that the policy generated."""
    turns: int | None
    """Turns of the policy."""
    left_out: str | None
    """Why the sample does not train."""


def read_step(samples: Path, step: int, max_rows: int = MAX_ROWS) -> list[Row]:
    """The first groups of a step that together have at most `max_rows` rows, at least one group, as far as their files
    can be read. Rows without a verdict are left out. samples: folder of the run's samples."""
    rows: list[Row] = []
    for file in sample_files(samples, step):
        with contextlib.suppress(DataError):
            rows += read_samples(file, COLUMNS).slice(0, 4 * max_rows).to_pylist()
        if len(rows) >= 4 * max_rows:
            break
    return whole_groups([row for row in rows if is_counted(row)], max_rows)


def saved_steps(samples: Path) -> list[int]:
    """The steps that have a folder or a file below `samples`, ascending."""
    try:
        names = [entry.name for entry in os.scandir(samples)]
    except OSError:
        return []
    return sorted({int(match[1]) for name in names if (match := _STEP.match(name))})


def is_counted(row: Mapping[str, Any]) -> bool:
    """True if a row has a verdict that trains: failed verifications and greedy baselines do not count."""
    return (
        isinstance(row.get("score"), int | float)
        and row.get("outcome") not in UNVERIFIED
        and (row.get("sample") or 0) >= 0
        and row.get("left_out") in (None, "", "truncated")
    )


def whole_groups(rows: Sequence[Row], max_rows: int) -> list[Row]:
    """The first groups, by prompt, that together have at most `max_rows` rows; at least one."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row["prompt_id"]), []).append(row)
    rows_of_groups: list[Row] = []
    for group in groups.values():
        if rows_of_groups and len(rows_of_groups) + len(group) > max_rows:
            break
        rows_of_groups += group
    return rows_of_groups


def chosen_steps(steps: Sequence[int], max_steps: int = MAX_STEPS) -> list[int]:
    """At most `max_steps` of the steps: the first and last quarter of them consecutive, the others evenly between them.

    >>> chosen_steps(range(1, 101), 8)
    [1, 2, 22, 41, 60, 79, 99, 100]
    """
    if len(steps) <= max_steps:
        return list(steps)
    ends = max_steps // 4
    inner = steps[ends:-ends]
    between = max_steps - 2 * ends
    evenly = [inner[round((index + 1) * (len(inner) - 1) / (between + 1))] for index in range(between)]
    return [*steps[:ends], *evenly, *steps[-ends:]]


def sampled_rows(run: Path, upto: int | None = None, max_steps: int = MAX_STEPS) -> Iterator[tuple[int, list[Row]]]:
    """Step and rows of the chosen steps, ascending; steps of which nothing can be read are left out. upto: the last
    step; None: all."""
    samples = run / "samples"
    for step in chosen_steps([step for step in saved_steps(samples) if upto is None or step <= upto], max_steps):
        if rows := read_step(samples, step):
            yield step, rows


def rescored_rows(run: Path) -> Iterator[dict[str, Any]]:
    """The lines of the newest file that `rlcli rescore RUN --keep` wrote, one at a time; none without a file."""
    files = sorted((run / RESCORED).glob("*.jsonl"), key=lambda path: path.lstat().st_mtime)
    if not files:
        return
    with contextlib.suppress(OSError):
        yield from json_objects(files[-1], max_bytes=0)
