"""What follows an update whose gradient is bad: decided once, here, since every rank has seen the same norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlcli.errors import RunFailed
from rlcli.trainer.keeper import restore
from rlcli.trainer.record import metrics_of, rewind
from rlcli.trainer.run_folder import EVENTS, RunFolder, events_of
from rlcli.trainer.usable import REASONS
from rlcli.workers.group import WorkerGroup

if TYPE_CHECKING:
    from rlcli.trainer.trainer import Trainer

MEND = "lower train.lr or train.max_grad_norm; the last checkpoint is sound"
MOST_IN_A_ROW = 3
"""After so many bad updates of one model without a good one between, no rule goes on."""
MOST_ROLLBACKS = 3
"""To one checkpoint: what goes wrong after it again and again will do so once more."""
MOST_SAVED = 5
"""Batches a run that are kept to be looked at."""
POLICY, CRITIC = "policy", "critic"


class RollBack(Exception):
    """The rule is to go back to the last checkpoint. The message says why."""


class Health:
    """Judges the updates of one run, and tells `folder`'s events and `note` of bad ones.

        sums = health.judge("policy", workers, step, minibatch, workers.update(minibatch, …))

    rule, bound: as `fault_tolerance.on_bad_update` and `bad_grad_norm`. in_a_row: bad updates since the last good one,
    of each model.
    """

    def __init__(
        self,
        rule: Literal["skip", "rollback", "stop"],
        bound: float | None,
        folder: RunFolder,
        note: Callable[[str], None],
    ) -> None:
        self.rule, self.bound, self.folder, self.note = rule, bound, folder, note
        self.in_a_row = {POLICY: 0, CRITIC: 0}

    def judge(
        self, model: str, workers: WorkerGroup, step: int, minibatch: int, sums: dict[str, float]
    ) -> dict[str, float]:
        """Give back what an update returned. Where it was bad (and so left out, on every rank) its batch is saved; then
        raises `RollBack` or `RunFailed`, as the rule is and the updates before it were."""
        if "bad" not in sums:
            self.in_a_row[model] = 0 if sums else self.in_a_row[model]
            return sums
        self.in_a_row[model] += 1
        why = f"bad update of the {model} in step {step}: its gradient norm is {sums['grad_norm']:.3g}"
        if self.bound is not None:
            why += f" (fault_tolerance.bad_grad_norm = {self.bound:g})"
        saved = self._save(model, workers, step, minibatch)
        self.folder.event(
            "bad_update", step=step, model=model, minibatch=minibatch, grad_norm=str(sums["grad_norm"]), saved=saved
        )
        where = f"; the batch is in {self.folder.path / saved}" if saved else ""
        if self.in_a_row[model] >= MOST_IN_A_ROW:
            raise RunFailed(f"{why}, the {MOST_IN_A_ROW}rd in a row{where}", MEND)
        if self.rule == "stop":
            raise RunFailed(f"{why}{where}", f"{MEND}; fault_tolerance.on_bad_update = skip would go on without it")
        if self.rule == "rollback":
            raise RollBack(f"{why}{where}")
        self.note(f"{why}; it is left out{where}")
        return sums

    def counted(self, step: int, reasons: Any) -> None:
        """Report a step in which no sample counts: it has nothing to train on, and its update is skipped. reasons: int8
        `[N]`, as `usable.left_out` has them."""
        import numpy as np

        if not len(reasons) or not reasons.all():
            return
        counts = np.bincount(reasons, minlength=1 + len(REASONS))[1:].tolist()
        by_reason = {name: count for name, count in zip(REASONS, counts, strict=True) if count}
        self.folder.event("step_skipped", step=step, samples=len(reasons), left_out=by_reason)
        why = ", ".join(f"{count} {name}" for name, count in by_reason.items())
        self.note(f"step {step} is skipped: all {len(reasons)} samples are left out ({why}); the weights stay")

    def state(self) -> dict[str, int]:
        """For `restore`, in a checkpoint."""
        return dict(self.in_a_row)

    def restore(self, state: Mapping[str, int]) -> None:
        self.in_a_row |= state

    def _save(self, model: str, workers: WorkerGroup, step: int, minibatch: int) -> str:
        """Have each rank save its share; the name below the run folder, or nothing where no more are saved."""
        folder = self.folder.path / "bad-batches"
        # Of one batch there are as many files as ranks.
        if len({path.name.rpartition(".rank-")[0] for path in folder.glob("*.pt")}) >= MOST_SAVED:
            return ""
        name = f"step-{step:06d}.{model}-{minibatch}"
        failed = [why for why in workers.save_minibatch(minibatch, str(folder / f"{name}.rank-{{rank}}.pt")) if why]
        if failed:
            self.note(f"the batch of a bad update could not be saved: {failed[0]}")
            return ""
        return f"bad-batches/{name}.rank-0.pt"


def check_trained(run: Path) -> None:
    """Raise `RunFailed` where each step of the run in the folder `run` left its updates out, as bad or for want of
    samples that count: its last weights are those that it began with."""
    steps = {line["step"]: line for line in metrics_of(run) if line["step"]}
    events = events_of(run)
    bad = {event.get("step") for event in events if event.get("event") == "bad_update" and event.get("model") == POLICY}
    none = {event.get("step") for event in events if event.get("event") == "step_skipped"}
    if steps and not any(line.get("update/count") for line in steps.values()) and steps.keys() <= bad | none:
        raise RunFailed(
            f"no update of the run's {len(steps)} steps has changed the policy: in {len(bad & steps.keys())} the "
            f"gradient was bad, in {len(none & steps.keys())} no sample counted",
            f"see {run / EVENTS} for why; {MEND if bad else 'raise rollout.max_response_tokens or mend the verifier'}",
        )


def roll_back(trainer: Trainer, why: str) -> None:
    """Go on from the last checkpoint, with the prompts that come next; where there is none yet, from the weights as
    they are, since the update that was bad has been left out."""
    trainer.phase("restore", trainer.done)
    trainer.keeper.poll(wait=True)
    trainer.ahead.settle()
    checkpoint = trainer.keeper.checkpoints.newest(trainer.view.note)
    if checkpoint is None:
        trainer.view.note(f"{why}; there is no checkpoint to go back to: the step is left with what it had learnt")
    else:
        before = [event for event in events_of(trainer.folder.path) if event["event"] == "rolled_back"]
        if sum(event["to"] == checkpoint.step for event in before) >= MOST_ROLLBACKS:
            raise RunFailed(f"{why}, and the run has gone back to {checkpoint.path} {MOST_ROLLBACKS} times", MEND)
        trainer.view.note(f"{why}; back to {checkpoint.path}, with other prompts")
        trainer.folder.event("rolled_back", step=trainer.done + 1, to=checkpoint.step)
        cursor, in_a_row = trainer.source.cursor, trainer.health.state()
        restore(trainer, checkpoint)
        trainer.source.cursor = cursor
        trainer.health.restore(in_a_row)
        trainer.view.start(trainer.config.train.steps, trainer.folder.path.name, trainer.done)
    trainer.ahead.drop()  # samples of the prompts that are given up
    trainer.invariants.forget()
    rewind(trainer.folder.path, trainer.done)  # the step's second attempt may have fewer rounds
    trainer.sync_weights()
