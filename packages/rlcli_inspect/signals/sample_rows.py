"""Reads a bounded part of a run's saved samples: some rows of some steps, by a rule that is the same every time."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.data.sample_files import sample_files
from rlcli.errors import DataError
from rlcli.evaluation.evaluation_folder import read_samples
from rlcli.evaluation.rescoring import RESCORED
from rlcli.support.reading import json_objects
from rlcli.types import UNVERIFIED

MOST_ROWS = 128
"""Rows of a step: whole groups, in the order of the files."""
MOST_STEPS = 64
"""Steps of a run: the first and the last quarter of these in a row, the others evenly between them."""
COLUMNS = (
    *("prompt_id", "group", "sample", "prompt", "response", "ground_truth", "score", "outcome"),
    *("response_tokens", "turns", "left_out"),
)

_STEP = re.compile(r"step-(\d+)")

Row = Mapping[str, Any]


def read_step(room: Path, step: int, most: int = MOST_ROWS) -> list[Row]:
    """The first groups of a step that together have at most `most` rows, at least one group, as far as their files can
    be read. Rows without a verdict are left out. room: the run's `samples`."""
    rows: list[Row] = []
    for file in sample_files(room, step):
        with contextlib.suppress(DataError):
            rows += read_samples(file, COLUMNS).slice(0, 4 * most).to_pylist()
        if len(rows) >= 4 * most:
            break
    return whole_groups([row for row in rows if is_counted(row)], most)


def saved_steps(room: Path) -> list[int]:
    """The steps that have a folder or a file in the room, ascending; it may be empty."""
    try:
        names = [entry.name for entry in os.scandir(room)]
    except OSError:
        return []
    return sorted({int(found[1]) for name in names if (found := _STEP.match(name))})


def is_counted(row: Row) -> bool:
    """Whether a row has a verdict that trains: neither failed verifications nor greedy baselines count."""
    return (
        isinstance(row.get("score"), int | float)
        and row.get("outcome") not in UNVERIFIED
        and (row.get("sample") or 0) >= 0
        and row.get("left_out") in (None, "", "truncated")
    )


def whole_groups(rows: Sequence[Row], most: int) -> list[Row]:
    """The first groups, by prompt, that together have at most `most` rows; at least one."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row["prompt_id"]), []).append(row)
    found: list[Row] = []
    for group in groups.values():
        if found and len(found) + len(group) > most:
            break
        found += group
    return found


def chosen_steps(steps: Sequence[int], most: int = MOST_STEPS) -> list[int]:
    """At most `most` of the steps: the first and last quarter of these in a row, the others evenly between them.

    >>> chosen_steps(range(1, 101), 8)
    [1, 2, 22, 41, 60, 79, 99, 100]
    """
    if len(steps) <= most:
        return list(steps)
    ends = most // 4
    inner = steps[ends:-ends]
    between = most - 2 * ends
    evenly = [inner[round((place + 1) * (len(inner) - 1) / (between + 1))] for place in range(between)]
    return [*steps[:ends], *evenly, *steps[-ends:]]


def sampled_rows(run: Path, upto: int | None = None, most: int = MOST_STEPS) -> Iterator[tuple[int, list[Row]]]:
    """Step and rows of the chosen steps, ascending; steps of which nothing can be read are left out. upto: the last
    step; None: all."""
    room = run / "samples"
    for step in chosen_steps([step for step in saved_steps(room) if upto is None or step <= upto], most):
        if rows := read_step(room, step):
            yield step, rows


def rescored_rows(run: Path) -> Iterator[dict[str, Any]]:
    """The lines of the newest file that `rlcli rescore RUN --keep` wrote, one at a time; none without a file."""
    files = sorted((run / RESCORED).glob("*.jsonl"), key=lambda path: path.lstat().st_mtime)
    if not files:
        return
    with contextlib.suppress(OSError):
        yield from json_objects(files[-1], max_bytes=0)
