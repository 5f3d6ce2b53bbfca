"""What a run warns of, step by step: it goes on all the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

MOST_UNVERIFIED = 0.05
"""A larger share of a step's verifications that used up their CPU time, or came to nothing, is warned of."""

IDLE_STEPS = 3
"""After so many steps without a gradient the run warns, and again after as many more."""


class Alarms:
    """Hears the metrics of each step and says through `note` what is wrong with them.

    mismatch_alarm: of the algorithm. top_p: of the sampling. idle_steps: how many have had no gradient, in a row; it
    goes into checkpoints.
    """

    def __init__(self, mismatch_alarm: float, top_p: float, note: Callable[[str], None]) -> None:
        self.mismatch_alarm, self.note = mismatch_alarm, note
        # Sampling from a nucleus of mass p makes up to −ln p of the KL by itself.
        self.by_design = -math.log(top_p)
        self.idle_steps = 0

    def hear(self, metrics: Mapping[str, float]) -> None:
        """Judge one step."""
        self._gradient(metrics)
        self._verification(metrics)
        if not metrics["rollout/staleness"]:  # samples of an older policy differ from the trainer's by design
            self._mismatch(metrics.get("mismatch/kl", 0.0))

    def hear_sync(self, metrics: Mapping[str, float]) -> None:
        """Warn where updates have changed nothing that the engines were sent after them. metrics: of the whole step."""
        moved = metrics["update/count"] and metrics.get("update/grad_norm", 0.0) > 0 and metrics["update/lr"] > 0
        if moved and metrics.get("sync/changed_tensors") == 0:
            self.note(
                f"the weights have not changed: {metrics['update/count']:.0f} updates at update/lr = "
                f"{metrics['update/lr']:.3g} left every tensor that the engine was sent as it was; the optimizer does "
                "not step, or model.dtype rounds its steps away"
            )

    def _gradient(self, metrics: Mapping[str, float]) -> None:
        """Warn where step after step teaches nothing."""
        if metrics.get("critic/grad_norm") or (metrics["update/count"] and metrics["update/grad_norm"] > 0):
            self.idle_steps = 0
            return
        self.idle_steps += 1
        if self.idle_steps % IDLE_STEPS == 0:
            why = f"rewards are equal in {metrics['reward/equal_groups']:.0%} of the groups"
            if metrics.get("mismatch/corrected") == 1.0:
                why += ", and algorithm.correction cuts every token"
            self.note(f"no gradient for {self.idle_steps} steps: {why}; reward {metrics['reward/mean']:.3g}")

    def _verification(self, metrics: Mapping[str, float]) -> None:
        """Warn where much was scored without a verdict on the answer."""
        overran = metrics.get("verify/overran", 0.0)
        if overran > MOST_UNVERIFIED:
            self.note(
                f"{overran:.0%} of the responses scored 0 because their verification used up its CPU time twice: "
                "look at their answers in samples/, or raise verifier.deadline_s"
            )
        unverified = {name: metrics.get(f"outcome/{name}", 0.0) for name in ("timeout", "crash")}
        if sum(unverified.values()) > MOST_UNVERIFIED:
            how = " and ".join(f"{share:.0%} {name}" for name, share in unverified.items() if share)
            self.note(f"verifications failed ({how}): those samples are left out; look at `detail` in samples/")

    def _mismatch(self, mismatch: float) -> None:
        """Warn where engine and trainer drift apart."""
        if mismatch - self.by_design > self.mismatch_alarm:
            self.note(
                f"engine and trainer disagree: mismatch/kl = {mismatch:.3g} is above algorithm.mismatch_alarm = "
                f"{self.mismatch_alarm:g}; look at mismatch/outliers and at model.dtype"
            )
