"""The result that `rlcli train` reports when a run ends. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.runs.records import evaluations_of, rewards_of

if TYPE_CHECKING:
    from rlcli.launch.resume import Resumption
    from rlcli.trainer.trainer import RunResult


def outcome_of(target: Path, result: RunResult) -> dict[str, Any]:
    """The result of a run in the folder `target`, as plain values."""
    return _outcome(target, result.steps, result.stopped, result.checkpoint, result.rewards, result.evaluations)


def finished(resumed: Resumption) -> dict[str, Any]:
    """The same for a run that is already finished."""
    assert resumed.checkpoint is not None, "a run without a checkpoint has steps to do"
    rewards, evaluations = rewards_of(resumed.run), evaluations_of(resumed.run)
    return _outcome(resumed.run, resumed.step, False, str(resumed.checkpoint.path), rewards, evaluations)


def _outcome(
    target: Path,
    steps: int,
    stopped: bool,
    checkpoint: str,
    rewards: list[float],
    evaluations: Mapping[int, dict[str, Any]],
) -> dict[str, Any]:
    found = [reward if math.isfinite(reward) else None for reward in rewards]
    return {
        "out": str(target),
        "steps": steps,
        "stopped": stopped,
        "checkpoint": checkpoint,
        "reward_first": found[0] if found else None,
        "reward_last": found[-1] if found else None,
        "rewards": found,
        "evaluations": dict(evaluations),
    }
