"""Generate the samples of the next step while this one is trained on (`async.staleness = 1`).

While step n is trained on, the engines generate for step n + 1 with the weights after step n − 1's update. New weights
are synced between two generations and never within one, so every sample is of one policy, and that policy is one
update older than the one that starts to train on it: with a correction the loss makes up for that, as it does for the
difference between engine and trainer (its π is the policy at the start of the step, μ the one that generated).

At the end of a step the generation beside it has ended too. So nothing is in flight when weights are synced, an
evaluation is made or a checkpoint is taken; and a checkpoint includes the prefetched samples with their tokens, since
the weights that generated them no longer exist.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, fields
from typing import Any, TypeVar

from rlcli.data.columns import BY_TURN, RENAMED, Samples, by_turn
from rlcli.data.messages import Collected
from rlcli.orchestrator.groups import Source
from rlcli.types import Outcome, Sample, Verdict

T = TypeVar("T")

GONE_S = 30.0
"""Longest wait for what killed workers were doing: callers that wait for them receive an error at once."""
COLUMNS = tuple(column.name for column in fields(Samples) if column.name != "parts")
ABSENT = {column.name: column.default for column in fields(Sample)}
"""In place of columns that older checkpoints lack."""
NUMBERS = tuple(f.name for f in fields(Collected) if f.name not in ("samples", "shards", "baselines", "begun"))
"""Fields of a batch besides its samples."""


class Prefetcher:
    """Returns the samples of each step, as `source` does, and prefetches those of the next one.

        batch = prefetcher.take(1)    # those of step 2 are being generated from now on
        prefetcher.wait()             # until they are there: then new weights may be synced
        batch = prefetcher.take(2)

    staleness: 0 prefetches nothing. last: the last step of the run. kill: ends the workers that generate. step: the
    prefetched or running one; 0: none. waited_for: whether the run waits for what is being generated.
    """

    def __init__(self, source: Source, staleness: int, last: int, kill: Callable[[], None]) -> None:
        self.source, self.staleness, self.last, self.kill = source, staleness, last, kill
        self.step = 0
        self.waited_for = True
        self._batch: Future[Collected] = Future()

    def take(self, step: int) -> Collected:
        """The samples of step `step`: the prefetched ones, else new ones by the engines' current weights. Then starts
        to prefetch the next ones. Raises what `Source.take` raises."""
        assert self.step in (0, step), f"step {self.step} was generated ahead, not {step}"
        batch = self._batch.result() if self.step else self.source.take(step)
        self.drop()
        if self.staleness and step < self.last:
            self.waited_for = False
            self.step, self._batch = step + 1, in_background(lambda: self.source.take(step + 1))
        return batch

    def wait(self) -> None:
        """Wait until nothing is being generated. Raises the error of the generation, if any."""
        self.waited_for = True
        if self.step:
            self._batch.result()

    def drop(self) -> None:
        """Discard the prefetched samples, once they are complete."""
        self.step, self._batch = 0, Future()

    def close(self) -> None:
        """End the run. If samples are still being generated after a failure, end that and the thread that waits for
        them: Ray must not be shut down under it."""
        if self.step and not self._batch.done():
            self.kill()
            wait([self._batch], GONE_S)

    def state(self) -> tuple[dict[str, Any] | None, list[Any]]:
        """The prefetched samples as JSON values, and the references to their tokens; None if there are none."""
        if not self.step:
            return None, []
        batch = self._batch.result()
        assert not batch.begun, "the source keeps aborted responses"
        plain = {
            "step": self.step,
            "samples": {name: getattr(batch.samples, name).tolist() for name in COLUMNS},
            "parts": {name: values.tolist() for name, values in batch.samples.parts.items()},
            "baselines": {prompt: asdict(verdict) for prompt, verdict in batch.baselines.items()},
            "numbers": {name: getattr(batch, name) for name in NUMBERS},
            "shards": len(batch.shards),
        }
        return plain, batch.shards

    def restore(self, state: Mapping[str, Any] | None, shards: Sequence[Any]) -> None:
        """Restore the result of `state`. shards: its references are the last ones."""
        import numpy as np

        self.drop()
        if state is None:
            return
        none = Samples.of([])
        known = {RENAMED.get(name, name): column for name, column in state["samples"].items()}
        count = len(known["prompt"])
        columns = {
            name: np.array(known.get(name, [ABSENT.get(name)] * count), dtype=getattr(none, name).dtype)
            for name in COLUMNS
            if name not in BY_TURN
        }
        columns |= {name: by_turn(name, known.get(name, [()] * count)) for name in BY_TURN}
        parts = {name: np.array(values, np.float64) for name, values in state["parts"].items()}
        baselines = {
            int(prompt): Verdict(**{**verdict, "outcome": Outcome(verdict["outcome"])})
            for prompt, verdict in state["baselines"].items()
        }
        own = list(shards[len(shards) - state["shards"] :])
        batch = Collected(Samples(**columns, parts=parts), own, baselines=baselines, **state["numbers"])
        self.step = state["step"]
        self._batch.set_result(batch)


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread, which keeps no process alive: after a failure its workers may never answer."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="ahead", daemon=True).start()
    return done
