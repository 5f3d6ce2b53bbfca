"""Arguments of a rollout that are the same for every worker that generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlcli.data.columns import TruncatedRule
from rlcli.rollout.engine import Sampling

PROGRESS_EVERY_S = 0.25
"""Shortest interval of a worker's progress reports."""
MOST_PROGRESS_PER_S = 40.0
"""Maximum rate of the reports of all workers together: reading them costs the controller time."""
GREEDY = -1
"""Index of the greedy response to a prompt. As a baseline it is not one of the samples; in `PromptTask.wanted` it is
like any other."""


@dataclass(frozen=True)
class Slice:
    """A part of streaming generation: the call returns complete samples, and the next call with a slice resumes the
    others. Exactly one of the two limits is set."""

    steps: int | None = None
    """It ends after this many engine steps and with the verdicts of all finished samples, so that the result does not
    depend on time."""
    seconds: float | None = None
    """It ends after this time, with the verdicts that have arrived."""


@dataclass(frozen=True)
class RolloutArguments:
    """Arguments of a round, for every worker."""

    sampling: Sampling
    """Sampling parameters of all responses."""
    seed: int
    """Seed of the run. The samples' seeds derive from it, `purpose` and the group's step."""
    purpose: str
    """`train` or `eval`, for the seeds."""
    step: int
    """Step of training that the samples are for."""
    save_as: str = ""
    """File for this worker's samples, as parquet, with `{rank}` in the name; empty: none. With `{part}` in the name
    they are saved as they finish, each time in a new part."""
    keep_tokens: bool = True
    """True if the tokens will be needed: not in an evaluation."""
    progress_s: float = PROGRESS_EVERY_S
    """Interval of a worker's progress reports (`progress_every`), in seconds."""
    truncated: TruncatedRule | Literal[""] = ""
    """As `train.truncated`, to record which samples are excluded; empty: none, as in an evaluation."""
    first_group: int = 0
    """Number of the step's groups in earlier rounds."""
    slice: Slice | None = None
    """Limit after which the call returns with unfinished requests; None: the call finishes all."""


def progress_every(workers: int) -> float:
    """Seconds between two progress reports of each worker, by the number of workers.

    >>> progress_every(8), progress_every(256)
    (0.25, 6.4)
    """
    return max(PROGRESS_EVERY_S, workers / MOST_PROGRESS_PER_S)
