"""Where a run's start goes: one event with what was done when, once the first tokens are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlcli.attempt import is_supervised
from rlcli.trainer.run_folder import RunFolder
from rlcli.workers import births, startup

if TYPE_CHECKING:
    from rlcli.workers.group import WorkerGroup


IDLE = ("sync", "generate", "evaluate")
"""Phases that begin when no engine generates. In others the next step's samples may be under way already, and a worker
answers once it is done with them: to ask there would make the run wait."""


class StartReport:
    """Hears the trainer's phases; once the first generation has ended and the engines are idle, it adds the event
    `startup` to the run's folder: seconds from the beginning of the command until each thing was done, in their order.
    Of what the workers do, those of the slowest."""

    def __init__(self, folder: RunFolder, groups: Sequence[WorkerGroup]) -> None:
        self._folder, self._groups = folder, groups
        self._generating = self._told = False

    def phase(self, name: str, step: int) -> None:
        if self._told:
            return
        if not self._generating:
            if name in ("generate", "evaluate"):
                startup.done("synced")
                self._generating = True
        elif name in IDLE:
            self._told = True
            workers = [moments for group in self._groups for moments in group.startup_moments()]
            self._folder.event("startup", step=step, done_after_s=timeline(_began(), startup.moments(), workers))


def timeline(began: float, driver: Mapping[str, float], workers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds from `began` until each thing was done, by the clock.

    >>> timeline(10.0, {"process": 10.5, "ray": 14.0}, [{"process": 15.0, "engine": 20.0}, {"engine": 21.0}])
    {'process': 0.5, 'ray': 4.0, 'worker: process': 5.0, 'worker: engine': 11.0}
    """
    found = {name: when - began for name, when in driver.items()}
    for moments in workers:
        for name, when in moments.items():
            label = f"worker: {name}"
            found[label] = max(found.get(label, 0.0), when - began)
    return {name: round(found[name], 3) for name in sorted(found, key=lambda name: found[name])}


def _began() -> float:
    """When the command did: its supervisor, where there is one."""
    import psutil

    process = psutil.Process()
    parent = process.parent() if is_supervised() else None
    return births.born(parent or process)
