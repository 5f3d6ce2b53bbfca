"""Checkpoints of the training loop: started after a step, written in the background, committed when complete.

`Trainer.state_dict` returns the controller state in a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rlcli.errors import RlcliError, RunFailed
from rlcli.runs.checkpoint import Checkpoint, Checkpoints
from rlcli.runs.folder import RunFolder
from rlcli.runs.record_files import metrics_of, sync
from rlcli.runs.run_measure import MEAN, score_of
from rlcli.training.worker.calls import WorkerCalls, Workers

if TYPE_CHECKING:
    from ray import ObjectRef

    from rlcli.data.sample_shard import SampleShard
    from rlcli.training.worker.state_writer import Files

POLICY, CRITIC, WAITING = "policy", "critic", "waiting.npz"
"""Names within a checkpoint."""


@dataclass
class _Pending:
    """A checkpoint that is being written."""

    step: int
    """Its step."""
    state: dict[str, object]
    """The controller's state."""
    files: Files = field(default_factory=dict)
    """Files that are written already."""


class Checkpointer:
    """Writes the checkpoints of one run.

        checkpointer.begin(50, state, shards)     # workers copy their state and write it in the background
        checkpointer.poll()                       # after each step: commits what is complete
        checkpointer.finish()                     # at the end: waits; raises if the last could not be written

    A failed write costs only that checkpoint: the run continues, and the previous checkpoint is kept.

    critics: dedicated workers of a critic, if any. flush: waits for records of steps that are written in the
    background. best_by: as `checkpoint.best_by`. texts: files that each checkpoint has, by name.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        folder: RunFolder,
        workers: Workers,
        critics: Workers | None,
        note: Callable[[str], None],
        flush: Callable[[], None] = lambda: None,
        best_by: str = MEAN,
        texts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.checkpoints, self.folder, self.note, self.flush = checkpoints, folder, note, flush
        self.workers, self._best_by, self.texts = workers, best_by, texts
        self.groups = {POLICY: workers} | ({CRITIC: critics} if critics is not None else {})
        self.saved = 0
        """The last step whose checkpoint was started or resumed from."""
        self.newest: Path | None = None
        """The last complete checkpoint."""
        self._evaluations: dict[int, dict[str, float]] = {}
        self._pending: _Pending | None = None
        self._failure: RunFailed | None = None
        self._synced = -1

    def begin(self, step: int, state: dict[str, object], shards: Sequence[ObjectRef[SampleShard] | None]) -> None:
        """Start to write the checkpoint of `step`, once an earlier one is done. shards: references to the tokens that
        `state["waiting"]` counts."""
        self.poll(wait=True)
        self.saved = step
        try:
            partial = self.checkpoints.begin(step)
            self._pending = _Pending(step, state)
            if shards:
                path = str(partial / WAITING)
                self._pending.files |= self.workers.call(WorkerCalls.write_waiting, path, [[shard] for shard in shards])
        except (OSError, RlcliError) as error:
            self._fail(step, error)
            return
        for name, group in self.groups.items():
            # No disk access yet: a rank that fails here has, for example, no memory for the copy, and the writers of
            # the others wait for it. That is not limited to one checkpoint.
            group.call(WorkerCalls.save_state, str(partial / name))

    def poll(self, wait: bool = False) -> None:
        """Commit the checkpoint that is being written if every rank has written its part; `wait`: block until then."""
        if self._pending is None:
            return
        pending = self._pending
        try:
            for group in self.groups.values():
                written = group.call(WorkerCalls.state_saved, wait)
                if None in written:
                    return
                for files in filter(None, written):
                    pending.files |= files
            self.flush()
            sync(self.folder.path, self._synced)
            config = (self.folder.path / "config.toml").read_text(encoding="utf-8")
            state = pending.state | {"evaluation": self._evaluations.get(pending.step)}
            scored = {step: score_of(metrics, self._best_by) for step, metrics in self._evaluations.items()}
            scores = {step: score for step, score in scored.items() if score is not None}
            self.newest = self.checkpoints.commit(pending.step, state, config, pending.files, scores, self.texts)
        except (OSError, RlcliError) as error:
            self._fail(pending.step, error)
            return
        self._pending, self._failure, self._synced = None, None, pending.step
        self.folder.event("checkpoint", step=pending.step, path=str(self.newest.relative_to(self.folder.path)))

    def finish(self) -> None:
        """Wait for what is being written. Raises RunFailed if the last checkpoint could not be written."""
        self.poll(wait=True)
        if self._failure is not None:
            raise self._failure

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record an evaluation: in the checkpoint of its step, and to keep the best checkpoints."""
        self._evaluations[step] = dict(metrics)

    def resumed(self, checkpoint: Checkpoint) -> None:
        """The run resumes from `checkpoint`, and its records end there."""
        self.saved, self.newest = checkpoint.step, checkpoint.path
        self._synced, self._failure = checkpoint.step, None
        self._evaluations.clear()
        for line in metrics_of(self.folder.path):
            metrics = {name.removeprefix("eval/"): value for name, value in line.items() if name.startswith("eval/")}
            if metrics:
                self.evaluated(line["step"], metrics)

    def _fail(self, step: int, error: OSError | RlcliError) -> None:
        """Abandon one checkpoint, unless the workers are lost: then raise."""
        if isinstance(error, RunFailed) and error.retry:
            raise error
        why = error.strerror or str(error) if isinstance(error, OSError) else error.message
        self._pending = None
        self.checkpoints.abandon(step)
        self.folder.event("checkpoint_failed", step=step, why=why)
        fallback = f"the previous one, {self.newest.name}, is kept" if self.newest else "there is no previous one"
        self.note(f"the checkpoint of step {step} could not be written: {why}; {fallback}")
        self._failure = RunFailed(f"the last checkpoint, of step {step}, could not be written: {why}; {fallback}")


PROBE_BOUND = {"float32": 3e-4, "float16": 0.03, "bfloat16": 0.15}
"""Largest mean |Δ| of the probe's log-probs when the same weights are loaded again, by dtype: three times and more what
rounding does on other devices and numbers of workers. (Single tokens may differ by ten times the mean.)"""


def check_probe(workers: Workers, checkpoint: Checkpoint, dtype: str) -> None:
    """Raise RunFailed if log-probs under the weights that `workers` have loaded, and compute with in `dtype`, are not
    those that the checkpoint recorded, apart from rounding."""
    with checkpoint.restoring() as state:
        probe = state["probe"]
        loaded = workers.call(WorkerCalls.probe_log_probs, [int(token) for token in probe["tokens"]])
        differences = [abs(a - b) for a, b in zip(probe["log_probs"], loaded, strict=True)]
        mean = math.fsum(differences) / max(len(differences), 1) if all(map(math.isfinite, differences)) else math.inf
        bound = max(PROBE_BOUND[dtype], PROBE_BOUND[state["dtype"]])
    if not mean <= bound:
        raise RunFailed(
            f"the weights loaded from {checkpoint.path} are not those that were saved: the probe's log-probs differ by "
            f"{mean:.3g} in the mean, more than {bound:g}",
            "check that model.path is still the model that the run started with",
        )
