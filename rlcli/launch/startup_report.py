"""Reports the startup time of a run: one event with a timeline, after the first tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlcli.cluster.process import process_time, startup_times
from rlcli.runs.folder import RunFolder
from rlcli.support.attempt import is_supervised
from rlcli.training.listener import Listener
from rlcli.training.worker.calls import WorkerCalls, Workers

IDLE = ("sync", "generate", "evaluate")
"""Phases that start when no engine generates. In others the next step's samples may already be in progress, and a call
would wait for them."""


class StartReport(Listener):
    """Adds the event `startup` to the run's folder after the first generation, when the engines are idle: the engine,
    and seconds from the start of the command until each part was done, in order; for workers, of the slowest. engines:
    the group that generates, one of `groups`."""

    def __init__(self, folder: RunFolder, groups: Sequence[Workers], engines: Workers) -> None:
        self._folder, self._groups, self._engines = folder, groups, engines
        self._generating = self._reported = False

    def phase(self, name: str, step: int) -> None:
        if self._reported:
            return
        if not self._generating:
            if name in ("generate", "evaluate"):
                startup_times.done("synced")
                self._generating = True
        elif name in IDLE:
            self._reported = True
            workers = [moments for group in self._groups for moments in group.call(WorkerCalls.startup_moments)]
            seconds = timeline(_began(), startup_times.moments(), workers)
            engine = self._engines.call(WorkerCalls.describe_engine)
            self._folder.event("startup", step=step, engine=engine, done_after_s=seconds)


def timeline(began: float, driver: Mapping[str, float], workers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds from `began` until each part was done.

    >>> timeline(10.0, {"process": 10.5, "ray": 14.0}, [{"process": 15.0, "engine": 20.0}, {"engine": 21.0}])
    {'process': 0.5, 'ray': 4.0, 'worker: process': 5.0, 'worker: engine': 11.0}
    """
    seconds = {name: when - began for name, when in driver.items()}
    for moments in workers:
        for name, when in moments.items():
            label = f"worker: {name}"
            seconds[label] = max(seconds.get(label, 0.0), when - began)
    return {name: round(seconds[name], 3) for name in sorted(seconds, key=lambda name: seconds[name])}


def _began() -> float:
    """Start time of the command: that of its supervisor, if there is one."""
    import psutil

    process = psutil.Process()
    parent = process.parent() if is_supervised() else None
    return process_time.started_at(parent or process)
