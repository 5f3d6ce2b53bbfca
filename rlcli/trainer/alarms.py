"""What a run warns of, step by step, by name: it continues all the same.

Each alarm is one function from a step's metrics to a text, or None. It goes to the terminal and, as the event `alarm`
with its name, to events.jsonl. docs/checks.md lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

IDLE_STEPS = 3
"""After so many steps without a gradient, or with rewards that are all equal, the run warns, and again after as many
more."""
FIRST_STEPS = 3
"""Steps at the beginning in which something must have happened: a response that ended, rewards that differ."""
REPEAT_EVERY = 50
"""Steps until the same alarm is reported again."""
MOST_UNVERIFIED = 0.05
"""Share of a step's verifications that used up their CPU time, or timed out or crashed, above which the run warns."""
TRUNCATED, REWARDED = 0.1, 0.25
"""The run warns where more than the first share of the responses is cut off, and their mean score is above the second,
in IDLE_STEPS steps in a row."""
DROP = 0.2
"""Rewards that are all equal and lie so far below the mean of the steps before are suspicious."""
EXACT, LOOSE = 1.05, 1.5
"""Largest `update/loss_scale`, and 1 ÷ the least, of a loss without other terms than the policy's, and with some."""

REMEMBERED = (
    *("idle_steps", "equal_steps", "steps", "endless_steps", "truncated_steps"),
    *("reward_sum", "rewards_differed"),
)
"""What `Alarms` keeps from step to step, and in checkpoints."""

Metrics = Mapping[str, float]


class Alarms:
    """Checks the metrics of each step, and reports what is wrong with them.

    mismatch_alarm: of the algorithm. top_p: of the sampling. other_terms: the loss has terms besides the policy's,
    which log-probs bear. note: prints a line. event: writes an event of this name and these fields. What it remembers
    goes into checkpoints (`state`).
    """

    def __init__(
        self,
        mismatch_alarm: float,
        top_p: float,
        note: Callable[[str], None],
        event: Callable[..., Any],
        *,
        other_terms: bool = False,
    ) -> None:
        self.mismatch_alarm, self.note, self.event = mismatch_alarm, note, event
        self.loss_scale = LOOSE if other_terms else EXACT
        # Sampling from a nucleus of mass p makes up to −ln p of the KL by itself.
        self.by_design = -math.log(top_p)
        self.idle_steps = 0
        self.equal_steps = 0
        self.steps = 0
        self.endless_steps = 0
        self.truncated_steps = 0
        self.reward_sum = 0.0
        self.rewards_differed = False
        self._reported: dict[str, int] = {}

    def check(self, step: int, metrics: Metrics) -> None:
        """Check one step, numbered from 1."""
        self.steps += 1
        self.endless_steps += metrics["response_tokens/truncated"] == 1.0
        for name, find in _ALARMS.items():
            self._report(step, name, find(self, metrics))
        if not math.isnan(metrics["reward/mean"]):
            self.reward_sum += metrics["reward/mean"]

    def check_sync(self, step: int, metrics: Metrics) -> None:
        """Check what the engines were sent after the updates of a step. metrics: of the whole step."""
        self._report(step, "weights_unchanged", self._weights_unchanged(metrics))

    def _report(self, step: int, name: str, text: str | None) -> None:
        if text and step >= self._reported.get(name, -REPEAT_EVERY) + REPEAT_EVERY:
            self._reported[name] = step
            self.note(f"alarm {name}: {text}")
            self.event("alarm", step=step, name=name, text=text)

    def state(self) -> dict[str, Any]:
        """For `restore`, in a checkpoint."""
        return {name: getattr(self, name) for name in REMEMBERED} | {"reported": dict(self._reported)}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, "_reported" if name == "reported" else name, value)

    def _no_gradient(self, metrics: Metrics) -> str | None:
        """Step after step teaches nothing."""
        if metrics.get("critic/grad_norm") or (metrics["update/count"] and metrics["update/grad_norm"] > 0):
            self.idle_steps = 0
            return None
        self.idle_steps += 1
        if self.idle_steps % IDLE_STEPS:
            return None
        self._reported.pop("no_gradient", None)  # it counts by itself
        why = f"rewards are equal in {metrics['reward/equal_groups']:.0%} of the groups"
        if metrics.get("mismatch/corrected") == 1.0:
            why += ", and algorithm.correction cuts every token"
        return f"no gradient for {self.idle_steps} steps: {why}; reward {metrics['reward/mean']:.3g}"

    def _mismatch(self, metrics: Metrics) -> str | None:
        """Engine and trainer drift apart. Samples of an older policy differ from the trainer's by design."""
        # Log-probs in another order have the same mean, and so the same `kl`: k3 sees each token.
        mismatch = max(metrics.get("mismatch/kl", 0.0), metrics.get("mismatch/k3", 0.0))
        if metrics["rollout/staleness"] or mismatch - self.by_design <= self.mismatch_alarm:
            return None
        return (
            f"engine and trainer disagree: mismatch/kl or mismatch/k3 = {mismatch:.3g} is above "
            f"algorithm.mismatch_alarm = {self.mismatch_alarm:g}; look at mismatch/outliers and at model.dtype"
        )

    def _constant_reward(self, metrics: Metrics) -> str | None:
        """Rewards that never differed, or that fell to one value."""
        if math.isnan(metrics["reward/std"]):  # no sample counts
            return None
        if metrics["reward/std"] > 0:
            self.equal_steps, self.rewards_differed = 0, True
            return None
        self.equal_steps += 1
        fell = self.steps > 1 and metrics["reward/mean"] < self.reward_sum / (self.steps - 1) - DROP
        if self.equal_steps < IDLE_STEPS or (self.rewards_differed and not fell):
            return None
        return (
            f"all rewards were {metrics['reward/mean']:.3g} in the last {self.equal_steps} steps; see whether the "
            "verifier fits the data: rlcli verifiers audit"
        )

    def _verifier_failures(self, metrics: Metrics) -> str | None:
        """Verifications fail by the verifier's own fault."""
        failed = {name: metrics[f"outcome/{name}"] for name in ("timeout", "crash")}
        if sum(failed.values()) <= MOST_UNVERIFIED:
            return None
        how = " and ".join(f"{share:.0%} {name}" for name, share in failed.items() if share)
        return f"verifications failed ({how}): those samples are left out; see the column detail in samples/"

    def _verifier_overruns(self, metrics: Metrics) -> str | None:
        """Responses score 0 because their verification takes too long."""
        overran = metrics["verify/overran"]
        if overran <= MOST_UNVERIFIED:
            return None
        return (
            f"{overran:.0%} of the responses scored 0 because their verification used up its CPU time twice: see "
            "their answers in samples/, or raise verifier.deadline_s"
        )

    def _reference_is_policy(self, metrics: Metrics) -> str | None:
        """A reference that moves with the policy holds nothing back. Before the first update it is the policy."""
        if self.steps < FIRST_STEPS or self.idle_steps or metrics.get("update/kl_start") != 0.0:
            return None
        return "the KL to the reference is 0 after updates (update/kl_start): the reference is the policy itself"

    def _weights_unchanged(self, metrics: Metrics) -> str | None:
        """Updates have changed nothing that the engines were sent after them."""
        moved = metrics["update/count"] and metrics.get("update/grad_norm", 0.0) > 0 and metrics["update/lr"] > 0
        if not moved or metrics.get("sync/changed_tensors") != 0:
            return None
        return (
            f"{metrics['update/count']:.0f} updates at update/lr = {metrics['update/lr']:.3g} left every tensor that "
            "the engine was sent as it was; the optimizer does not step, or model.dtype rounds its steps away"
        )

    def _no_response_ends(self, metrics: Metrics) -> str | None:
        """The end of a response is never sampled: the stop tokens are wrong, or the limit is too low."""
        if not self.endless_steps == self.steps >= FIRST_STEPS:
            return None
        return (
            f"every response of {self.steps} steps was cut off at rollout.max_response_tokens; see the stop tokens of "
            "--dry-run, and the limit"
        )

    def _truncated_rewarded(self, metrics: Metrics) -> str | None:
        """Responses that were cut off are rewarded."""
        share, reward = metrics["response_tokens/truncated"], metrics.get("reward/truncated", 0.0)
        self.truncated_steps = self.truncated_steps + 1 if share > TRUNCATED and reward > REWARDED else 0
        if self.truncated_steps < IDLE_STEPS:
            return None
        return (
            f"{share:.0%} of the responses were cut off, and their mean score is {reward:.3g}: a model is rewarded for "
            "not ending; give train.truncated = zero_reward or mask, or a higher limit"
        )

    def _loss_scale(self, metrics: Metrics) -> str | None:
        """The loss pulls along the advantages, as hard as they say."""
        scale = metrics.get("update/loss_scale", 1.0)
        if 1 / self.loss_scale <= scale <= self.loss_scale:
            return None
        return (
            f"the gradient of the loss along the advantages is {scale:.3g} times what it should be: its sign or its "
            "denominator is wrong on some worker"
        )


_ALARMS: dict[str, Callable[[Alarms, Metrics], str | None]] = {
    "constant_reward": Alarms._constant_reward,
    "no_gradient": Alarms._no_gradient,
    "mismatch": Alarms._mismatch,
    "verifier_failures": Alarms._verifier_failures,
    "verifier_overruns": Alarms._verifier_overruns,
    "reference_is_policy": Alarms._reference_is_policy,
    "no_response_ends": Alarms._no_response_ends,
    "truncated_rewarded": Alarms._truncated_rewarded,
    "loss_scale": Alarms._loss_scale,
}
NAMES = (*_ALARMS, "weights_unchanged")
"""Of all alarms, as docs/checks.md lists them."""
