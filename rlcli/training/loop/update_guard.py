"""Reaction to an update with a bad gradient: decided once, here, since every rank has seen the same norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlcli.errors import RunFailed
from rlcli.rollout.scheduler.sample_filter import REASONS
from rlcli.runs.checkpoint import Checkpoint
from rlcli.runs.folder import EVENTS, RunFolder, events_of
from rlcli.runs.record_files import metrics_of
from rlcli.training.loop.warnings import without_signal
from rlcli.training.worker.calls import WorkerCalls, Workers

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int8

LEFT_OUT = {
    "timeout": "verifications timed out: raise verifier.deadline_s, or check the verifier (rlcli verifiers audit)",
    "crash": "verifications crashed: see the column detail in samples/, and check the verifier (rlcli verifiers audit)",
    "truncated": "responses were cut off: raise rollout.max_response_tokens, or set train.truncated = keep",
    "environment": "the environment failed: see the column detail in samples/, and play it (rlcli env try)",
    "unparsed": "the judge's replies could not be read: see the column detail in samples/",
    "baseline": "the verification of greedy responses failed: check the verifier (rlcli verifiers audit)",
    "alone": "one sample of each group was left: raise rollout.samples_per_prompt",
}
"""Reason why no sample counts (`sample_filter.REASONS`) → advice."""
HINT = "lower train.lr or train.max_grad_norm; the last checkpoint is not affected"
MOST_IN_A_ROW = 3
"""Under any rule, the run stops after this many bad updates of one model in a row."""
MOST_ROLLBACKS = 3
"""Maximum number of rollbacks to one checkpoint: the next attempt would fail too."""
MOST_SAVED = 5
"""Maximum number of batches of a run that are saved for inspection."""
POLICY, CRITIC = "policy", "critic"


class RollBack(Exception):
    """The rule is to return to the last checkpoint. The message states the reason."""


class UpdateGuard:
    """Checks the updates of one run, and reports bad ones to `folder`'s events and `note`.

        sums = guard.check("policy", workers, step, minibatch, workers.call(WorkerCalls.update, minibatch, …))

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

    def check(
        self, model: str, workers: Workers, step: int, minibatch: int, sums: dict[str, float]
    ) -> dict[str, float]:
        """Return the result of an update. If it was bad (and so skipped on every rank) its batch is saved; then raises
        `RollBack` or `RunFailed`, depending on the rule and the previous updates."""
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
            raise RunFailed(f"{why}, the {MOST_IN_A_ROW}rd in a row{where}", HINT)
        if self.rule == "stop":
            raise RunFailed(f"{why}{where}", f"{HINT}; fault_tolerance.on_bad_update = skip would continue without it")
        if self.rule == "rollback":
            raise RollBack(f"{why}{where}")
        self.note(f"{why}; the update is skipped{where}")
        return sums

    def check_counted(self, step: int, reasons: Int8[np.ndarray, " S"]) -> None:
        """Report a step in which no sample counts: it has nothing to train on, and its update is skipped. reasons: as
        returned by `sample_filter.exclusion_reasons`."""
        import numpy as np

        if not len(reasons) or not reasons.all():
            return
        counts = np.bincount(reasons, minlength=1 + len(REASONS))[1:].tolist()
        by_reason = {name: count for name, count in zip(REASONS, counts, strict=True) if count}
        self.folder.event("step_skipped", step=step, samples=len(reasons), left_out=by_reason)
        why = ", ".join(f"{count} {name}" for name, count in by_reason.items())
        self.note(
            f"step {step} is skipped: all {len(reasons)} samples are left out ({why}); the weights are unchanged; "
            f"{LEFT_OUT[max(by_reason, key=lambda name: by_reason[name])]}"
        )

    def state(self) -> dict[str, int]:
        """For `restore`, in a checkpoint."""
        return dict(self.in_a_row)

    def restore(self, state: Mapping[str, int]) -> None:
        self.in_a_row |= state

    def _save(self, model: str, workers: Workers, step: int, minibatch: int) -> str:
        """Have each rank save its share; returns the name below the run folder, or "" if no more are saved."""
        folder = self.folder.path / "bad-batches"
        # One batch has as many files as ranks.
        if len({path.name.rpartition(".rank-")[0] for path in folder.glob("*.pt")}) >= MOST_SAVED:
            return ""
        name = f"step-{step:06d}.{model}-{minibatch}"
        path = str(folder / f"{name}.rank-{{rank}}.pt")
        failed = [why for why in workers.call(WorkerCalls.save_minibatch, minibatch, path) if why]
        if failed:
            self.note(f"the batch of a bad update could not be saved: {failed[0]}")
            return ""
        return f"bad-batches/{name}.rank-0.pt"


def check_trained(run: Path, samples: int) -> str:
    """Raise `RunFailed` if each step of the run in the folder `run` skipped its updates, as bad or because no sample
    counted: its last weights are its initial ones. If no step had a learning signal, returns that, with advice; else
    an empty text. samples: of a group."""
    steps = {line["step"]: line for line in metrics_of(run) if line["step"]}
    events = events_of(run)
    bad = {event.get("step") for event in events if event.get("event") == "bad_update" and event.get("model") == POLICY}
    none = {event.get("step") for event in events if event.get("event") == "step_skipped"}
    if not steps or any(line.get("update/count") for line in steps.values()):
        return ""
    if steps.keys() <= bad | none:
        raise RunFailed(
            f"no update of the run's {len(steps)} steps has changed the policy: in {len(bad & steps.keys())} the "
            f"gradient was bad, in {len(none & steps.keys())} no sample counted",
            f"see {run / EVENTS} for why; {HINT if bad else _most_left_out(events)}",
        )
    last = steps[max(steps)]
    return (
        f"no update of the run's {len(steps)} steps has changed the policy: the rewards within each group are equal; "
        f"{without_signal(last, samples)}"
    )


def _most_left_out(events: Sequence[Mapping[str, object]]) -> str:
    """Advice for the most frequent reason for which samples were left out."""
    counts: Counter[str] = Counter()
    for event in events:
        left_out = event.get("left_out")
        if event.get("event") == "step_skipped" and isinstance(left_out, dict):
            counts.update(left_out)
    return LEFT_OUT.get(counts.most_common(1)[0][0], "fix the verifier") if counts else "fix the verifier"


def check_rollbacks(run: Path, checkpoint: Checkpoint, why: str) -> None:
    """Raise `RunFailed` if the run has rolled back to `checkpoint` too often already."""
    rollbacks = [event for event in events_of(run) if event["event"] == "rolled_back"]
    if sum(event["to"] == checkpoint.step for event in rollbacks) >= MOST_ROLLBACKS:
        raise RunFailed(f"{why}, and the run has gone back to {checkpoint.path} {MOST_ROLLBACKS} times", HINT)
