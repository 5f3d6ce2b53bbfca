"""What every tracker has to do. In the test of a new one: `conforms("my_tracker", folder, CONFIG)`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from rlcli.runs.folder import RunFolder
from rlcli.tracking import open_trackers

STEPS = [(1, {"reward/mean": 0.5, "eval/pass@1": 0.25}), (2, {"reward/mean": 0.75, "eval/pass@1": math.nan})]
RESUMED = [(3, {"reward/mean": 1.0})]


def log_steps(
    name: str,
    folder: RunFolder,
    config: Mapping[str, Any],
    steps: list[tuple[int, dict[str, float]]],
    resumed_at: int | None = None,
    failed: bool = False,
) -> None:
    """Log `steps` to one tracker, which must report no problem."""
    notes: list[str] = []
    trackers = open_trackers([name], folder, "arith", config, notes.append, resumed_at)
    for step, metrics in steps:
        trackers.log(step, metrics)
    trackers.close(failed)
    assert notes == [], (folder.logs / f"tracker-{name}.log").read_text()


def conforms(
    name: str,
    folder: RunFolder,
    config: Mapping[str, Any],
    failed: bool = False,
    before_resume: Callable[[], None] = lambda: None,
) -> str:
    """Log two steps, one with a NaN, then a third in a resumed run, which must be the same run in the tracker. failed:
    the resumed run fails. Returns the run's id in the tracker."""
    log_steps(name, folder, config, STEPS)
    before_resume()
    first = json.loads((folder.path / "trackers.json").read_text())[name]
    log_steps(name, folder, config, RESUMED, resumed_at=2, failed=failed)
    assert json.loads((folder.path / "trackers.json").read_text()) == {name: first}
    found: str = first
    return found
