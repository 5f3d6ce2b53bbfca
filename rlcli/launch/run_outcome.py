"""The result that `rlcli train` reports when a run ends. Imports nothing heavy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.runs.record_files import RunResult, course_of, evaluations_of
from rlcli.runs.run_measure import LOSS, measure_of

if TYPE_CHECKING:
    from rlcli.launch.resume import Resumption


def outcome_of(target: Path, result: RunResult) -> dict[str, Any]:
    """The result of a run in the folder `target`, as plain values: its rewards or, if the dataset gives the responses,
    its losses."""
    values = [value if math.isfinite(value) else None for value in result.course]
    name, several = ("loss", "losses") if result.measure == LOSS else ("reward", "rewards")
    return {
        "out": str(target),
        "steps": result.steps,
        "stopped": result.stopped,
        "checkpoint": result.checkpoint,
        f"{name}_first": values[0] if values else None,
        f"{name}_last": values[-1] if values else None,
        several: values,
        "evaluations": dict(result.evaluations),
    }


def finished(resumed: Resumption) -> dict[str, Any]:
    """The same for a run that is already finished."""
    run, checkpoint = resumed.run, resumed.checkpoint
    assert checkpoint is not None, "a run without a checkpoint has steps to do"
    measure = measure_of(resumed.resolved.config.model_dump())
    course = course_of(run, measure)
    return outcome_of(run, RunResult(checkpoint.step, measure, course, evaluations_of(run), str(checkpoint.path)))
