"""The result that `rlcli train` reports when a run ends. Imports nothing heavy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.runs.records import RunResult, evaluations_of, rewards_of

if TYPE_CHECKING:
    from rlcli.launch.resume import Resumption


def outcome_of(target: Path, result: RunResult) -> dict[str, Any]:
    """The result of a run in the folder `target`, as plain values."""
    found = [reward if math.isfinite(reward) else None for reward in result.rewards]
    return {
        "out": str(target),
        "steps": result.steps,
        "stopped": result.stopped,
        "checkpoint": result.checkpoint,
        "reward_first": found[0] if found else None,
        "reward_last": found[-1] if found else None,
        "rewards": found,
        "evaluations": dict(result.evaluations),
    }


def finished(resumed: Resumption) -> dict[str, Any]:
    """The same for a run that is already finished."""
    run, checkpoint = resumed.run, resumed.checkpoint
    assert checkpoint is not None, "a run without a checkpoint has steps to do"
    return outcome_of(run, RunResult(checkpoint.step, rewards_of(run), evaluations_of(run), str(checkpoint.path)))
