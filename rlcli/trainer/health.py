"""What follows an update whose gradient is bad: decided once, here, since every rank has seen the same norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlcli.config.schema import FaultTolerance
from rlcli.errors import RunFailed
from rlcli.trainer.run_folder import RunFolder
from rlcli.workers.group import WorkerGroup

MOST_IN_A_ROW = 3
"""After so many bad updates of one model without a good one between, no rule goes on."""
MOST_SAVED = 5
"""Batches a run that are kept to be looked at."""
POLICY, CRITIC = "policy", "critic"


class RollBack(Exception):
    """The rule is to go back to the last checkpoint. The message says why."""


class Health:
    """Judges the updates of one run by `rule`, and tells `folder`'s events and `note` of bad ones.

        sums = health.judge("policy", workers, step, minibatch, workers.update(minibatch, …))

    in_a_row: bad updates since the last good one, of each model.
    """

    def __init__(self, rule: FaultTolerance, folder: RunFolder, note: Callable[[str], None]) -> None:
        self.rule, self.folder, self.note = rule, folder, note
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
        if self.rule.bad_grad_norm is not None:
            why += f" (fault_tolerance.bad_grad_norm = {self.rule.bad_grad_norm:g})"
        saved = self._save(model, workers, step, minibatch)
        self.folder.event(
            "bad_update", step=step, model=model, minibatch=minibatch, grad_norm=str(sums["grad_norm"]), saved=saved
        )
        where = f"; the batch is in {self.folder.path / saved}" if saved else ""
        if self.in_a_row[model] >= MOST_IN_A_ROW:
            raise RunFailed(
                f"{why}, the {MOST_IN_A_ROW}rd in a row{where}",
                "lower train.lr or train.max_grad_norm; the last checkpoint is sound",
            )
        if self.rule.on_bad_update == "stop":
            raise RunFailed(
                f"{why}{where}", "lower train.lr or train.max_grad_norm, or let fault_tolerance.on_bad_update be skip"
            )
        if self.rule.on_bad_update == "rollback":
            raise RollBack(f"{why}{where}")
        self.note(f"{why}; it is left out{where}")
        return sums

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
