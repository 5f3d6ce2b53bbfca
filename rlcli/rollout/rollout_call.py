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
    """A part of streaming generation: the call returns what is complete, and the next call with a slice resumes the
    rest. One of the two limits is given."""

    steps: int | None = None
    """It ends after this many engine steps, with the verdicts on all that is finished, so that no clock decides what
    the call returns."""
    seconds: float | None = None
    """It ends after this time, with the verdicts that are there."""


@dataclass(frozen=True)
class RolloutCall:
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
    """Whether the tokens will be needed."""
    progress_s: float = PROGRESS_EVERY_S
    """Interval of a worker's progress reports (`progress_every`), in seconds."""
    truncated: TruncatedRule | Literal[""] = ""
    """As `train.truncated`, to record what is left out; empty: nothing is, as in an evaluation."""
    first_group: int = 0
    """Number of the step's groups in earlier rounds."""
    slice: Slice | None = None
    """When the call returns before all is finished; None: never."""


def progress_every(workers: int) -> float:
    """Seconds between two progress reports of each of so many workers.

    >>> progress_every(8), progress_every(256)
    (0.25, 6.4)
    """
    return max(PROGRESS_EVERY_S, workers / MOST_PROGRESS_PER_S)
