"""Listeners follow a run from the controller: generated samples, each step's metrics, evaluations and phases.

A package adds a listener in its pyproject.toml; every run creates one of each:

    [project.entry-points."rlcli.listeners"]
    beeper = "my_package.beeper:Beeper"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import RlcliError
from rlcli.registry import Registry

if TYPE_CHECKING:
    from rlcli.config.schema import RunConfig
    from rlcli.data.columns import SampleTable


@dataclass(frozen=True)
class ListenedRun:
    """The run that a listener follows, and where it reports."""

    path: Path
    """The run's folder."""
    config: RunConfig
    """Its configuration."""
    note: Callable[[str], None]
    """Prints a line."""
    warn: Callable[[str, int], None]
    """Prints a warning of a step."""
    event: Callable[..., object]
    """Writes an event to `events.jsonl`: its name, then its fields by keyword."""
    plan: Callable[[], object] = lambda: None
    """The planner's input for this run, or None. Computed when it is called."""


class Listener:
    """Follows one run. A subclass overrides what it needs; everything else does nothing.

        class Beeper(Listener):
            def __init__(self, run: ListenedRun) -> None:
                self.run = run

            def step(self, number: int, metrics: Mapping[str, float]) -> None:
                self.run.note(f"step {number}: reward {metrics['reward/mean']:.2f}")

    Methods are called in the controller, between the parts of a step, and delay the run: work that takes long belongs
    in a thread. A listener must not change what it receives.
    """

    def begin(self, done: int) -> None:
        """The run starts, resumes or rolls back, after step `done`: records of later steps are removed."""

    def phase(self, name: str, step: int) -> None:
        """A phase of a step begins."""

    def generated(self, samples: SampleTable) -> None:
        """The samples of a step are generated and verified, ordered by prompt."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """The weights after `step` were evaluated before the first step of this process. Later evaluations come with
        their step's metrics."""

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        """A step is done, and its samples and metrics are recorded."""

    def finish(self, number: int) -> None:
        """The run ends after step `number`: completed or stopped by a user."""

    def close(self) -> None:
        """The process leaves the training loop, after an error too. Must not wait."""


LISTENERS: Registry[Callable[[ListenedRun], Listener]] = Registry("listener", "rlcli.listeners")


def listener_types() -> dict[str, Callable[[ListenedRun], Listener]]:
    """All published listeners by name. Raises `RlcliError` if one cannot be imported."""
    return {name: LISTENERS.get(name) for name in LISTENERS.names()}


class Listeners:
    """The listeners of a run, called in the order in which they were added.

    A listener that raises, or that cannot be created, is dropped with one line, and the run continues. Errors of the
    run itself (`RlcliError`, such as that of a dead worker) are raised.
    """

    def __init__(self, note: Callable[[str], None], listeners: Sequence[Listener] = ()) -> None:
        self._note = note
        self._listeners = list(listeners)

    @classmethod
    def of(cls, run: ListenedRun, types: Mapping[str, Callable[[ListenedRun], Listener]]) -> Listeners:
        """The published listeners, by name, created for a run."""
        listeners = cls(run.note)
        for name, create in types.items():
            try:
                listeners.add(create(run))
            except RlcliError:
                raise
            except Exception as error:
                run.note(f"the listener {name} cannot follow this run: {type(error).__name__}: {error}")
        return listeners

    def add(self, listener: Listener) -> None:
        """Call `listener` too, after the others."""
        self._listeners.append(listener)

    def begin(self, done: int) -> None:
        """See `Listener`, as for the following methods."""
        self._call(lambda listener: listener.begin(done))

    def phase(self, name: str, step: int) -> None:
        self._call(lambda listener: listener.phase(name, step))

    def generated(self, samples: SampleTable) -> None:
        self._call(lambda listener: listener.generated(samples))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call(lambda listener: listener.evaluated(step, metrics))

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        self._call(lambda listener: listener.step(number, metrics))

    def finish(self, number: int) -> None:
        self._call(lambda listener: listener.finish(number))

    def close(self) -> None:
        """Close all of them, then raise the first error of the run itself."""
        errors: list[RlcliError] = []
        for listener in list(self._listeners):
            try:
                self._call_one(listener, lambda listener: listener.close())
            except RlcliError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _call(self, method: Callable[[Listener], None]) -> None:
        for listener in list(self._listeners):
            self._call_one(listener, method)

    def _call_one(self, listener: Listener, method: Callable[[Listener], None]) -> None:
        try:
            method(listener)
        except RlcliError:
            raise
        except Exception as error:
            self._listeners.remove(listener)
            name = f"{type(listener).__module__}.{type(listener).__qualname__}"
            self._note(f"the listener {name} failed and is not called again: {type(error).__name__}: {error}")
