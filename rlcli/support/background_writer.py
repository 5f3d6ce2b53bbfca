"""Writes files for viewers in the background: the run neither waits for them nor fails if they fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Full, Queue

from rlcli.errors import RlcliError

MOST_WAITING = 4
"""Maximum number of files that wait to be written. Further ones are left out: a slow disk must not slow a step."""


class BackgroundWriter:
    """Runs write functions one after another in a daemon thread.

        writer.put(lambda: write_table(path, table))
        writer.flush()       # before a checkpoint is committed
        writer.problem()     # the first error since the last call, or ""

    name: of the thread, and of its files in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: Queue[Callable[[], None]] = Queue(MOST_WAITING)
        self._started = False
        self._problem = ""

    def put(self, work: Callable[[], None]) -> None:
        """Queue `work`, or leave it out if the queue is full. Nothing may change the data that `work` reads."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        try:
            self._work.put_nowait(work)
        except Full:
            self._note(f"the disk is too slow for all {self._name}: some are left out")

    @property
    def idle(self) -> bool:
        """True if everything is written."""
        return self._work.unfinished_tasks == 0

    def flush(self) -> None:
        """Wait until everything is written."""
        self._work.join()

    def problem(self) -> str:
        """The first error since the last call, in one line; empty if there was none."""
        problem, self._problem = self._problem, ""
        return problem

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except Exception as error:  # of any kind: the run continues without this file
                why = error.message if isinstance(error, RlcliError) else f"{type(error).__name__}: {error}"
                self._note(f"{self._name} could not be written: {why}")
            finally:
                del work
                self._work.task_done()

    def _note(self, text: str) -> None:
        self._problem = self._problem or text.splitlines()[0]
