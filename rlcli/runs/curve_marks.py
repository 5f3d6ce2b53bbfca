"""The steps after which a resumed run read changed files: marks on its curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rlcli.runs.listing import number

INPUTS_CHANGED = "inputs_changed"
"""Event: the run was resumed with files that have changed. `step`: the last one with the old files; `text`: what has
changed; `files`: of each its key, its path and both digests."""
INPUTS_UNRECORDED = "inputs_unrecorded"
"""Event: a run without a record of what it read by path was resumed."""
MOST_NAMES = 3


@dataclass(frozen=True)
class Mark:
    """A step at which a curve is marked.

    Mark(step=50, text="mine.py changed after step 50")
    """

    step: int
    """The last step with the old files."""
    text: str


def marks_of(events: Iterable[Mapping[str, Any]]) -> list[Mark]:
    """The marks of a run with these events, oldest first. Steps that were removed when the run resumed from an earlier
    checkpoint, or started over, have none: the mark moves to where the new steps begin.

    >>> changed = {"event": "inputs_changed", "step": 4, "files": [{"path": "/home/me/mine.py"}]}
    >>> marks_of([changed, {"event": "resumed", "step": 4}])
    [Mark(step=4, text='mine.py changed after step 4')]
    >>> marks_of([changed, {"event": "resumed", "step": 2}])
    [Mark(step=2, text='mine.py changed after step 2')]
    >>> marks_of([changed, {"event": "started", "step": 0}])
    []
    """
    changes: list[tuple[int, str]] = []
    for event in events:
        kind, step = event.get("event"), int(number(event.get("step")) or 0)
        if kind == "started":
            changes = []
        elif kind == "resumed":
            changes = [(min(at, step), names) for at, names in changes]
        elif kind == INPUTS_CHANGED and step > 0:
            changes.append((step, _names(event.get("files"))))
    return [Mark(step, f"{names} changed after step {step}") for step, names in changes]


def _names(files: object) -> str:
    """The names of the files of an event, which may have been edited."""
    paths = [file.get("path") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    names = list(dict.fromkeys(PurePath(path).name for path in paths if isinstance(path, str)))
    unlisted = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {unlisted} more" if unlisted > 0 else "") or "a file"
