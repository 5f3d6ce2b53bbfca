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
    """The run that a tracker is started for.

    folder: of the run; the tracker's local files go below it, unless the tracker's own environment variables name
    another place. project: its name in the tracker. config: the resolved configuration, nested. id: the run's id in the
    tracker before it was interrupted; empty for a new run. resumed_at: for a resumed run, the last step that is kept;
    -1 if none is.
    """

    folder: Path
    project: str
    config: Mapping[str, Any]
    id: str = ""
    resumed_at: int | None = None

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class TrackedSample:
    """One response for people to read. sample: its number among those to its prompt. messages: the conversation, each
    with `role` and `content`; long ones are cut. response_tokens: None if unknown."""

    prompt_id: str
    sample: int
    score: float
    outcome: str
    answer: str
    response_tokens: int | None
    messages: Sequence[Mapping[str, str]]

    @property
    def conversation(self) -> str:
        """The messages as one text."""
        return "\n\n".join(f"{one['role']}: {one['content']}" for one in self.messages)

    @property
    def title(self) -> str:
        return f"score {self.score:g}, {self.outcome}, {self.prompt_id} #{self.sample}"


class Tracker(Protocol):
    """Receives each step's metrics. It is made and called in a separate process, so it may raise, print, block or die,
    and the run continues. A class that the entry-point group `rlcli.trackers` names:

        class Printer(Tracker):
            def __init__(self, run: TrackedRun) -> None:
                print(run.name)

            def log(self, step: int, metrics: Mapping[str, float]) -> None:
                print(step, metrics)

            def close(self, failed: bool) -> None: ...

    `samples` and `picture` are optional. Its module imports its library within the methods: a run that uses another
    tracker may lack it.

    id: the run's id in the tracker, for resuming after an interruption; empty if it needs none.
    """

    id: str = ""

    def __init__(self, run: TrackedRun) -> None: ...

    @classmethod
    def check(cls) -> None:
        """Raise `SetupError` if the tracker cannot be used here: its package or its API key is missing. Called in the
        run's process, before anything starts."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """steps ascend, but for those that a resumed run repeats; metrics may be NaN or infinite."""

    def samples(self, step: int, name: str, samples: Sequence[TrackedSample]) -> None:
        """Some samples of a step whose metrics were logged before. name: `samples`, or `eval/samples` for those of an
        evaluation."""

    def picture(self, name: str, file: Path) -> None:
        """A PNG at the end of the run. name: `reward`, the curve."""

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
