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

    def __init__(self, source: BatchSource, concurrent: bool, last_step: int, kill: Callable[[], None]) -> None:
        self.source = source
        self.concurrent = concurrent
        """Whether the engines generate while a step is trained on."""
        self.last_step = last_step
        """Last step of the run."""
        self.kill = kill
        """Kills the workers that generate."""
        self.waited_for = True
        """Whether the run waits for the current generation."""
        self.busy_s = 0.0
        """Seconds for which the engines generated while the last step was trained on."""
        self._stop = threading.Event()
        self.generation: Future[None] = Future()
        """Done when the engines are idle."""
        self.generation.set_result(None)

    def take(self, step: int) -> RolloutBatch:
        """Return the samples of step `step`, and start to generate for the next ones. Raises what `BatchSource.take`
        raises."""
        self.wait()
        batch = self.source.take(step)
        self.busy_s = 0.0
        if self.concurrent and step < self.last_step:
            self.waited_for = False
            self._stop.clear()
            self.generation = in_background(lambda: self._prefetch(step))
        return batch

    def wait(self) -> None:
        """Wait until the engines are idle. Raises the error of the generation, if any."""
        self.waited_for = True
        self._stop.set()
        self.generation.result()

    def discard(self) -> None:
        """Discard what was generated for later steps."""
        self.wait()
        self.source.discard()

    def close(self) -> None:
        """Kill the workers if they still generate after a failure, and wait for the thread that called them: it must
        end before Ray is shut down."""
        if not self.generation.done():
            self.kill()
            wait([self.generation], KILL_TIMEOUT_S)

    def _prefetch(self, step: int) -> None:
        start = time.perf_counter()
        self.source.prefetch(step, self._stop.is_set)
        self.busy_s = time.perf_counter() - start
