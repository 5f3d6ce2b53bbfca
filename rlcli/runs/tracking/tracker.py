"""The tracker protocol, which plugins implement too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rlcli.errors import SetupError


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is started for."""

    folder: Path
    """Folder of the run. The tracker's local files go below it, unless its environment variables name another folder.
    """
    project: str
    """The project's name in the tracker."""
    config: Mapping[str, Any]
    """The resolved configuration, nested."""
    id: str = ""
    """The run's id in the tracker before it was interrupted; empty for a new run."""
    resumed_at: int | None = None
    """For a resumed run, the last step that is kept, -1 if none is; None for a new run."""

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class TrackedSample:
    """One response for people to read."""

    prompt_id: str
    """Dataset, split and row of the prompt."""
    sample: int
    """Its number among the samples of its prompt."""
    score: float
    """Reward of the verifier."""
    outcome: str
    """Outcome of the verification."""
    answer: str
    """The answer that the verifier extracted; empty if there is none."""
    response_tokens: int | None
    """None if unknown."""
    messages: Sequence[Mapping[str, str]]
    """The conversation, each message with `role` and `content`; long ones are cut."""

    @property
    def conversation(self) -> str:
        """The messages as one text."""
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)

    @property
    def title(self) -> str:
        return f"score {self.score:g}, {self.outcome}, {self.prompt_id} #{self.sample}"


class Tracker(Protocol):
    """Receives each step's metrics. It runs in a separate process, so it may raise, print, block or die, and the run
    continues. Implemented by a class that the entry-point group `rlcli.trackers` names:

        class Printer(Tracker):
            def __init__(self, run: TrackedRun) -> None:
                print(run.name)

            def log(self, step: int, metrics: Mapping[str, float]) -> None:
                print(step, metrics)

            def close(self, failed: bool) -> None: ...

    `samples` and `image` are optional. Its module imports its library within the methods: a run that uses another
    tracker may lack it.
    """

    id: str = ""
    """The run's id in the tracker, for resuming after an interruption; empty if it needs none."""

    def __init__(self, run: TrackedRun) -> None: ...

    @classmethod
    def check(cls) -> None:
        """Raise `SetupError` if the tracker cannot be used here: its package or its API key is missing. Called in the
        run's process, before anything starts."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step. Steps ascend, except those that a resumed run repeats; metrics may be NaN or
        infinite."""

    def samples(self, step: int, name: str, samples: Sequence[TrackedSample]) -> None:
        """Record some samples of a step whose metrics were logged before. name: `samples`, or `eval/samples` for those
        of an evaluation."""

    def image(self, name: str, file: Path) -> None:
        """Record a PNG at the end of the run. name: `reward`, the curve."""

    def close(self, failed: bool) -> None:
        """Send the rest. failed: the run failed."""


def require(package: str) -> None:
    """Raise `SetupError` if `package` is missing, which the extra of rlcli with its name adds."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # a folder `wandb` in the working directory is not a package
        raise SetupError(
            f"tracking.trackers names {package}, which is not installed",
            f"pip install 'rlcli[{package}]', or leave it out",
        )


def require_key(package: str, has_key: bool) -> None:
    """Raise `SetupError` unless `package`, which sends to a server, has an API key."""
    if not has_key:
        raise SetupError(f"{package} has no API key", f"run `{package} login`, or set {package.upper()}_MODE=offline")
