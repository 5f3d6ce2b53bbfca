"""Generation for later steps while one is trained on (`async.staleness`, with dedicated rollout workers).

The engines generate until the new weights arrive. The source decides how many groups may be started, and whether a
weight update waits until they are complete. During a weight sync, an evaluation or a checkpoint, no call to the engines
is in progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from rlcli.data.messages import RolloutBatch
from rlcli.rollout.scheduler.batch_source import BatchSource
from rlcli.support.daemon_thread import in_background

KILL_TIMEOUT_S = 30.0
"""Longest wait for the thread that generates, once its workers are killed: its call to them fails at once."""


class Prefetcher:
    """Returns the samples of each step, as `source` does, and generates for the next steps in the background.

    batch = prefetcher.take(1)    # from now on the engines generate for step 2, and later ones
    prefetcher.wait()             # until the engines are idle: then new weights may be synced
    batch = prefetcher.take(2)
    """

    def __init__(self, source: BatchSource, concurrent: bool, last: int, kill: Callable[[], None]) -> None:
        self.source = source
        self.concurrent = concurrent
        """Whether the engines generate while a step is trained on."""
        self.last = last
        """Last step of the run."""
        self.kill = kill
        """Ends the workers that generate."""
        self.waited_for = True
        """Whether the run waits for the current generation."""
        self.busy_s = 0.0
        """Seconds for which the engines generated while the last step was trained on."""
        self._over = threading.Event()
        self._running: Future[None] = Future()
        self._running.set_result(None)

    def take(self, step: int) -> RolloutBatch:
        """Return the samples of step `step`, and start to generate for the next ones. Raises what `Source.take`
        raises."""
        self.wait()
        batch = self.source.take(step)
        self.busy_s = 0.0
        if self.concurrent and step < self.last:
            self.waited_for = False
            self._over.clear()
            self._running = in_background(lambda: self._ahead(step))
        return batch

    @property
    def generating(self) -> Future[None]:
        """Future that is done when the engines are idle."""
        return self._running

    def wait(self) -> None:
        """Wait until the engines are idle. Raises the error of the generation, if any."""
        self.waited_for = True
        self._over.set()
        self._running.result()

    def discard(self) -> None:
        """Discard what was generated for later steps."""
        self.wait()
        self.source.discard()

    def close(self) -> None:
        """Kill the workers if they still generate after a failure, and wait for the thread that called them: it must
        end before Ray is shut down."""
        if not self._running.done():
            self.kill()
            wait([self._running], KILL_TIMEOUT_S)

    def _ahead(self, step: int) -> None:
        start = time.perf_counter()
        self.source.prefetch(step, self._over.is_set)
        self.busy_s = time.perf_counter() - start
