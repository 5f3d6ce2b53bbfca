"""Arguments of a rollout that are the same for every worker that generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlcli.data.columns import TruncatedRule
from rlcli.rollout.engine import Sampling

PROGRESS_EVERY_S = 0.25
MOST_PROGRESS_PER_S = 40.0
"""Messages of all workers together: reading them costs the controller time, however long generation takes."""
GREEDY = -1
"""Used instead of a sample's index for the greedy response to a prompt. As a baseline it is not one of its samples; in
`PromptTask.wanted` it is one like the others."""


@dataclass(frozen=True)
class Slice:
    """A part of a generation that goes on through weight updates: the call returns what is complete, and the next call
    with a slice goes on with the rest. steps: ends after so many steps of the engine, with the verdicts on all that is
    finished, so that no clock decides what the call returns. seconds: ends after so long, with the verdicts that are
    there. One of the two is given."""

    steps: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class RolloutCall:
    """Arguments for every worker. purpose, step, seed: the seeds of the samples derive from these. save_as: where this
    worker's samples are saved, as parquet, with `{rank}` in the name; empty: nowhere. With `{part}` in the name they
    are saved as they finish, each time in a new part. keep_tokens: the tokens will be needed. progress_s: interval of
    a worker's progress reports (see `progress_every`). truncated: as `train.truncated`, to record what is left out;
    empty: nothing is left out, as in an evaluation. first_group: number of the step's groups in earlier rounds. slice:
    when the call returns before all is finished; None: never."""

    sampling: Sampling
    seed: int
    purpose: str
    step: int
    save_as: str = ""
    keep_tokens: bool = True
    progress_s: float = PROGRESS_EVERY_S
    truncated: TruncatedRule | Literal[""] = ""
    first_group: int = 0
    slice: Slice | None = None


def progress_every(workers: int) -> float:
    """Seconds between two progress reports of each of so many workers.

    >>> progress_every(8), progress_every(256)
    (0.25, 6.4)
    """
    return max(PROGRESS_EVERY_S, workers / MOST_PROGRESS_PER_S)
