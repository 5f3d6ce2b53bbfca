"""Checkpoints in the loop: begun after a step, written while the next ones run, committed when all of it is there.

What a checkpoint's controller state is made of, and how it is put back, is told by `snapshot` and `restore`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.data.mixture import resumed
from rlcli.errors import RlcliError, RunFailed
from rlcli.trainer.checkpoint import Checkpoint, Checkpoints
from rlcli.trainer.groups import as_groups, as_plain
from rlcli.trainer.record import evaluations_of, metrics_of, rewards_of, rewind, sync
from rlcli.trainer.run_folder import RunFolder
from rlcli.workers.group import WorkerGroup

if TYPE_CHECKING:
    from rlcli.trainer.trainer import Trainer

POLICY, CRITIC, WAITING = "policy", "critic", "waiting.npz"
"""Names within a checkpoint."""
CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3, "fp8": 1.0}
"""How far log-probs of the same weights may be apart, by what the engine, or the trainer, computes them in."""


@dataclass
class _Pending:
    """A checkpoint that is being written. files: what is written already, name → size and hash."""

    step: int
    state: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


class Keeper:
    """Writes the checkpoints of one run.

        keeper.begin(50, state, shards)     # the workers copy what is theirs and write it in the background
        keeper.poll()                       # after each step: commits what has become whole
        keeper.finish()                     # before leaving: waits, and raises where the last could not be written

    A write that fails costs the run nothing but that checkpoint: it goes on with the one before.

    critics: the workers of a critic that is placed apart. saved: the last step that was begun, or from which the run
    goes on. newest: the last whole checkpoint.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        folder: RunFolder,
        workers: WorkerGroup,
        critics: WorkerGroup | None,
        note: Callable[[str], None],
    ) -> None:
        self.checkpoints, self.folder, self.note = checkpoints, folder, note
        self.workers = workers
        self.groups = {POLICY: workers} | ({CRITIC: critics} if critics is not None else {})
        self.saved = 0
        self.newest: Path | None = None
        self._evaluations: dict[int, dict[str, float]] = {}
        self._pending: _Pending | None = None
        self._failure: RunFailed | None = None
        self._synced = -1

    def begin(self, step: int, state: dict[str, Any], shards: Sequence[Any]) -> None:
        """Start to write the checkpoint of `step`, once an earlier one is done. shards: references to the tokens that
        `state["waiting"]` counts."""
        self.poll(wait=True)
        self.saved = step
        try:
            partial = self.checkpoints.begin(step)
            self._pending = _Pending(step, state)
            if shards:
                self._pending.files |= self.workers.write_waiting(str(partial / WAITING), [[shard] for shard in shards])
        except (OSError, RlcliError) as error:
            self._fail(step, error)
            return
        for name, group in self.groups.items():
            # Touches no disk yet: a rank that fails here has no memory for the copy, say, and the others' writers
            # wait for it. That is no matter of one checkpoint.
            group.save_state(str(partial / name))

    def poll(self, wait: bool = False) -> None:
        """Commit the checkpoint that is being written if every rank has written its part; `wait` until then."""
        if self._pending is None:
            return
        pending = self._pending
        try:
            for group in self.groups.values():
                written = group.state_saved(wait)
                if any(files is None for files in written):
                    return
                for files in written:
                    pending.files |= files
            sync(self.folder.path, self._synced)
            config = (self.folder.path / "config.toml").read_text(encoding="utf-8")
            state = pending.state | {"evaluation": self._evaluations.get(pending.step)}
            self.newest = self.checkpoints.commit(pending.step, state, config, pending.files, self.scores)
        except (OSError, RlcliError) as error:
            self._fail(pending.step, error)
            return
        self._pending, self._failure, self._synced = None, None, pending.step
        self.folder.event("checkpoint", step=pending.step, path=str(self.newest.relative_to(self.folder.path)))

    def finish(self) -> None:
        """Wait for what is being written. Raises RunFailed where the last checkpoint could not be written."""
        self.poll(wait=True)
        if self._failure is not None:
            raise self._failure

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note an evaluation: its step's checkpoint tells it, and by pass@1 the best checkpoints are kept."""
        self._evaluations[step] = dict(metrics)

    @property
    def scores(self) -> dict[int, float]:
        """Step → pass@1 of its evaluation."""
        return {step: metrics["pass@1"] for step, metrics in self._evaluations.items()}

    def resumed(self, checkpoint: Checkpoint) -> None:
        """The run goes on from `checkpoint`, and its record ends there."""
        self.saved, self.newest = checkpoint.step, checkpoint.path
        self._synced, self._failure = checkpoint.step, None
        self._evaluations.clear()
        for line in metrics_of(self.folder.path):
            found = {name.removeprefix("eval/"): value for name, value in line.items() if name.startswith("eval/")}
            if found:
                self.evaluated(line["step"], found)

    def _fail(self, step: int, error: OSError | RlcliError) -> None:
        """Give one checkpoint up, unless it is the workers that are gone."""
        if isinstance(error, RunFailed) and error.retry:
            raise error
        why = error.strerror or str(error) if isinstance(error, OSError) else error.message
        self._pending = None
        self.checkpoints.abandon(step)
        self.folder.event("checkpoint_failed", step=step, why=why)
        before = f"the one before it, {self.newest.name}, stands" if self.newest else "there is none before it"
        self.note(f"the checkpoint of step {step} could not be written: {why}; {before}")
        mend = f"mend that, then: rlcli train --resume {self.folder.path}"
        self._failure = RunFailed(f"the last checkpoint, of step {step}, could not be written: {why}; {before}", mend)


def snapshot(trainer: Trainer) -> tuple[dict[str, Any], list[Any]]:
    """Everything beside the workers' own state that the next step depends on, as plain values, and references to the
    tokens of the samples that wait."""
    waiting, shards = as_plain(trainer.source.waiting)
    ahead, ahead_shards = trainer.ahead.state()
    return {
        "step": trainer.done,
        "version": trainer.version,
        "alarms": trainer.alarms.state(),
        "cursor": dict(trainer.source.cursor.state()),
        "kl": trainer.algorithm.kl.state(),
        "entropy": trainer.algorithm.entropy.state(),
        "bad_updates": trainer.health.state(),
        "waiting": waiting,
        "ahead": ahead,
        "data": trainer.fingerprint,
        "dtype": trainer.dtype,
        "probe": {
            "tokens": trainer.probe.tolist(),
            "log_probs": trainer.workers.probe_log_probs(trainer.probe.tolist()),
        },
    }, [*shards, *ahead_shards]


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put trainer and workers back to where `snapshot` was taken, and cut the record back to there: last of all, for
    where it cannot be gone on from the checkpoint, what comes after may be wanted yet. Raises RunFailed where the
    weights, once loaded, are not those that were saved."""
    state, keeper = checkpoint.state, trainer.keeper
    for name, group in keeper.groups.items():
        group.load_state(str(checkpoint.path / name))
    _check_probe(trainer, checkpoint)
    ahead = state.get("ahead")  # of a run without async.staleness there is nothing
    kept = bool(state["waiting"] or ahead)
    shards = trainer.workers.read_waiting(str(checkpoint.path / WAITING)) if kept else []
    trainer.source.cursor = resumed(trainer.source.cursor, state["cursor"], len(trainer.source.prompts))
    trainer.source.waiting = as_groups(state["waiting"], shards)
    trainer.ahead.restore(ahead, shards)
    trainer.algorithm.kl.restore(state["kl"])
    trainer.algorithm.entropy.restore(state["entropy"])
    trainer.health.restore(state["bad_updates"])
    trainer.alarms.restore(state.get("alarms", {}))  # checkpoints of before lack it
    trainer.invariants.forget()
    trainer.done = checkpoint.step
    trainer.version = state["version"] - 1  # the sync that follows is the one that was counted
    rewind(trainer.folder.path, checkpoint.step, sampled=trainer.ahead.step)
    trainer.rewards = rewards_of(trainer.folder.path)
    trainer.evaluations = evaluations_of(trainer.folder.path)
    keeper.resumed(checkpoint)


def _check_probe(trainer: Trainer, checkpoint: Checkpoint) -> None:
    probe, dtype = checkpoint.state["probe"], checkpoint.state["dtype"]
    # An engine that is less exact than the trainer has no part in this.
    exact = not trainer.config.rollout.quantization
    tolerance = trainer.tolerance if exact else CANARY_TOLERANCE[trainer.dtype]
    if dtype != trainer.dtype:  # model.dtype is auto, and the device another
        trainer.view.note(f"from here on the run computes in {trainer.dtype}: it was {dtype}")
        tolerance = max(tolerance, CANARY_TOLERANCE[dtype])
    loaded = trainer.workers.probe_log_probs(probe["tokens"])
    difference = max((abs(a - b) for a, b in zip(probe["log_probs"], loaded, strict=True)), default=0.0)
    if not difference <= tolerance:
        raise RunFailed(
            f"the weights that {checkpoint.path} gave are not those that were saved: log-probs of the probe differ by "
            f"{difference:.3g}",
            "see that model.path still holds what the run began with",
        )
