"""Generate for later steps while one is trained on (`async.staleness`, with engines in workers of their own).

The engines go on generating until their new weights are there. How many groups may be begun, and whether an update
waits until they are complete, is the source's part. When weights are synced, an evaluation is made or a checkpoint is
taken, no call to the engines is under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from rlcli.data.messages import RolloutBatch
from rlcli.rollout.scheduler.groups import Source
from rlcli.support.daemon_thread import in_background

GONE_S = 30.0
"""Longest wait for what killed workers were doing: callers that wait for them receive an error at once."""


class Prefetcher:
    """Returns the samples of each step, as `source` does, and generates for the next ones meanwhile.

        batch = prefetcher.take(1)    # from now on the engines generate for step 2, and later ones
        prefetcher.wait()             # until they are free: then new weights may be synced
        batch = prefetcher.take(2)

    beside: whether anything is generated while a step is trained on. last: the last step of the run. kill: ends the
    workers that generate. waited_for: whether the run waits for what is being generated. busy_s: seconds for which the
    engines generated beside the last step.
    """

    def __init__(self, source: Source, beside: bool, last: int, kill: Callable[[], None]) -> None:
        self.source, self.beside, self.last, self.kill = source, beside, last, kill
        self.waited_for = True
        self.busy_s = 0.0
        self._over = threading.Event()
        self._running: Future[None] = Future()
        self._running.set_result(None)

    def take(self, step: int) -> RolloutBatch:
        """The samples of step `step`; then generation goes on for the next ones. Raises what `Source.take` raises."""
        self.wait()
        batch = self.source.take(step)
        self.busy_s = 0.0
        if self.beside and step < self.last:
            self.waited_for = False
            self._over.clear()
            self._running = in_background(lambda: self._ahead(step))
        return batch

    @property
    def generating(self) -> Future[None]:
        """Done when the engines are free."""
        return self._running

    def wait(self) -> None:
        """Wait until the engines are free. Raises the error of the generation, if any."""
        self.waited_for = True
        self._over.set()
        self._running.result()

    def drop(self) -> None:
        """Discard what was generated for later steps."""
        self.wait()
        self.source.drop()

    def close(self) -> None:
        """End the run. If samples are still being generated after a failure, end that and the thread that waits for
        them: Ray must not be shut down under it."""
        if not self._running.done():
            self.kill()
            wait([self._running], GONE_S)

    def _ahead(self, step: int) -> None:
        began = time.perf_counter()
        self.source.ahead(step, self._over.is_set)
        self.busy_s = time.perf_counter() - began
