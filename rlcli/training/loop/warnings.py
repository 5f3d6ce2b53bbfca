"""Warnings, checked after every step by name. They do not stop the run.

Each warning is one function from a step's metrics to a text, or None. The text is printed in the terminal and written
to events.jsonl as the event `warning` with its name. docs/checks.md lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Self

from rlcli.config.schema import RunConfig
from rlcli.types import UNVERIFIED

IDLE_STEPS = 3
"""Number of steps in a row that a condition must hold before the run warns."""
FIRST_STEPS = 3
"""Number of first steps in which some response must have ended, and the policy moved away from its reference."""
REPEAT_EVERY = 50
"""Number of steps until the same warning is reported again."""
FEW_GROUPS, GROUPS = 24, 256
"""Groups in a row without a learning signal before the run warns. The first number applies where groups should teach
something, the second where their rewards are equal: a task that is too hard, or nearly solved, has many such groups."""
RESPONSES = 1024
"""Responses in a row with one reward before the run warns, if a hard task could cause that: all wrong since the run
began, or after rewards have differed."""
FEW_RESPONSES = 96
"""Number of responses, all of them cut off, before the run warns."""
RECENT = 0.95
"""Decay per step of the weight of earlier steps in measured shares: about the last 20 steps count."""
FEW = 8
"""Least number of responses behind such a share: of 8 samples a step, one is 12%."""
MOST_UNVERIFIED = 0.05
"""Share of the verifications that used up their CPU time, or timed out or crashed, above which the run warns."""
TRUNCATED, REWARDED = 0.1, 0.25
"""The run warns if more than the first share of the responses is cut off, and their mean score is above the second
and above half of the overall mean."""
DROP = 0.2
"""Equal rewards that are this far below the mean of the previous steps are suspicious."""
SCALE = 1.05
"""Largest `update/loss_scale`, and 1 ÷ the smallest, apart from the effect of clipping."""
WARMED_UP = 2.0
"""Sum of the learning rates of all updates ÷ the peak, after which the policy must differ from its reference: bfloat16
rounds the first steps of a warm-up away."""
LEAST_LR = 1e-3
"""Learning rate ÷ the peak below which an update may change nothing that is sent: a schedule ends near 0."""

REMEMBERED = (
    *("idle_steps", "equal_steps", "steps", "endless_steps", "mismatch_steps", "scale_steps", "lr_sum"),
    *("reward_sum", "best_reward", "last_reward", "rewards_differed"),
    *("responses", "failed", "overran", "cut_off", "cut_off_reward"),
)
"""State that `Warnings` keeps between steps and in checkpoints."""

Metrics = Mapping[str, float]


class Warnings:
    """Checks the metrics of each step and reports problems. Its state is part of checkpoints (`state`).

    mismatch_warning: of the algorithm. top_p: of the sampling. note: prints a line. event: writes an event of this name
    and these fields. prompts, samples: groups a step, and samples a group. lr: the peak. unrewarded: rewards have no
    part in the update, since the dataset gives the responses or a teacher scores them.
    """

    def __init__(
        self,
        mismatch_warning: float,
        top_p: float,
        note: Callable[[str], None],
        event: Callable[..., object],
        *,
        prompts: int,
        samples: int,
        lr: float,
        unrewarded: bool = False,
    ) -> None:
        self.mismatch_warning, self.note, self.event = mismatch_warning, note, event
        self.prompts, self.samples, self.lr, self.unrewarded = prompts, samples, lr, unrewarded
        # Top-p sampling with p < 1 alone causes a KL of up to −ln p.
        self.by_design = -math.log(top_p)
        self.steps = self.idle_steps = self.equal_steps = self.endless_steps = 0
        self.mismatch_steps = self.scale_steps = 0
        self.lr_sum = self.reward_sum = 0.0
        self.best_reward = -math.inf
        self.rewards_differed = False
        self.last_reward: float | None = None
        # Over the last steps, earlier ones with less weight (see RECENT).
        self.responses = self.failed = self.overran = self.cut_off = self.cut_off_reward = 0.0
        self._reported: dict[str, int] = {}

    @classmethod
    def of(
        cls, config: RunConfig, mismatch_warning: float, note: Callable[[str], None], event: Callable[..., object]
    ) -> Self:
        """The warnings of a run with this configuration."""
        return cls(
            mismatch_warning,
            config.rollout.top_p,
            note,
            event,
            prompts=config.rollout.prompts_per_step,
            samples=config.rollout.samples_per_prompt,
            lr=config.train.lr,
            unrewarded=bool(config.data.response or config.teacher.models),
        )

    def check(self, step: int, metrics: Metrics) -> None:
        """Check one step, numbered from 1."""
        self.steps += 1
        self.endless_steps += metrics["response_tokens/truncated"] == 1.0
        self._count(metrics)
        for name, find in _CHECKS.items():
            self._report(step, name, find(self, metrics))
        if not math.isnan(metrics["reward/mean"]):
            self.reward_sum += metrics["reward/mean"]

    def _count(self, metrics: Metrics) -> None:
        """Add a step to the sums over the last steps and over all steps."""
        truncated = metrics["response_tokens/truncated"]
        shares = {
            "responses": 1.0,
            "failed": sum(metrics.get(f"outcome/{name}", 0.0) for name in UNVERIFIED),
            "overran": metrics["verify/overran"],
            "cut_off": truncated,
            "cut_off_reward": truncated * metrics.get("reward/truncated", 0.0),
        }
        for name, share in shares.items():
            setattr(self, name, RECENT * getattr(self, name) + self.prompts * self.samples * share)
        if not math.isnan(metrics["reward/mean"]):
            self.best_reward = max(self.best_reward, metrics["reward/mean"])

    def check_sync(self, step: int, metrics: Metrics) -> None:
        """Check what was sent to the engines after the updates of a step. metrics: of the whole step."""
        self._report(step, "weights_unchanged", self._weights_unchanged(metrics))
        self._report(step, "mismatch", self._mismatch_of_equal_weights(metrics))
        if metrics["update/count"]:
            self.lr_sum += metrics["update/lr"]

    def log_prob_check(self, step: int, text: str) -> None:
        """Report a failed log-prob check, where that does not stop the run."""
        self._report(step, LOG_PROB_CHECK, text)

    def _report(self, step: int, name: str, text: str | None) -> None:
        if text and step >= self._reported.get(name, -REPEAT_EVERY) + REPEAT_EVERY:
            self._reported[name] = step
            self.note(f"warning {name}: {text}")
            self.event("warning", step=step, name=name, text=text)

    def state(self) -> dict[str, object]:
        """For `restore`, in a checkpoint."""
        return {name: getattr(self, name) for name in REMEMBERED} | {"reported": dict(self._reported)}

    def restore(self, state: Mapping[str, object]) -> None:
        for name, value in state.items():
            setattr(self, "_reported" if name == "reported" else name, value)

    def _no_gradient(self, metrics: Metrics) -> str | None:
        """Several steps without a learning signal. If rewards never differed, `_constant_reward` reports that."""
        trained = metrics.get("critic/grad_norm") or (metrics["update/count"] and metrics["update/grad_norm"] > 0)
        solved = metrics["reward/std"] == 0 and metrics["reward/mean"] >= self.best_reward
        if trained or solved:
            self.idle_steps = 0
            return None
        self.idle_steps += 1
        equal = metrics["reward/equal_groups"] == 1.0
        groups = self.idle_steps * self.prompts
        if self.idle_steps < IDLE_STEPS or groups < (GROUPS if equal else FEW_GROUPS):
            return None
        if equal and not self.rewards_differed:
            return None
        why = f"rewards are equal in {metrics['reward/equal_groups']:.0%} of the groups"
        hint = without_signal(metrics, self.samples)
        if metrics.get("mismatch/corrected") == 1.0:
            why += ", and algorithm.correction cuts every token"
            hint = "see mismatch/kl, and raise the bound of algorithm.correction or give another one"
        return f"no gradient for {self.idle_steps} steps: {why}; reward {metrics['reward/mean']:.3g}; {hint}"

    def _mismatch(self, metrics: Metrics) -> str | None:
        """Engine and trainer disagree. Samples of an older policy differ from the trainer's by design: for them see
        `_mismatch_of_equal_weights`."""
        # Log-probs in another order have the same mean, and so the same `kl`: k3 compares each token.
        mismatch = max(metrics.get("mismatch/kl", 0.0), metrics.get("mismatch/k3", 0.0))
        if metrics["rollout/staleness"] or mismatch - self.by_design <= self.mismatch_warning:
            self.mismatch_steps = 0
            return None
        self.mismatch_steps += 1
        if self.mismatch_steps < 2:  # one token of a small step can do that
            return None
        return (
            f"engine and trainer disagree: mismatch/kl or mismatch/k3 = {mismatch:.3g} is above "
            f"algorithm.mismatch_warning = {self.mismatch_warning:g}; check mismatch/outliers and model.dtype"
        )

    def _mismatch_of_equal_weights(self, metrics: Metrics) -> str | None:
        """Engine and trainer disagree although their weights are equal, in a step with samples of an older policy."""
        difference = metrics.get("log_prob_check/k3", 0.0)
        if not metrics.get("rollout/staleness") or difference <= self.mismatch_warning:
            return None
        return (
            f"engine and trainer disagree at equal weights: log_prob_check/k3 = {difference:.3g} is above "
            f"algorithm.mismatch_warning = {self.mismatch_warning:g}; so mismatch/kl is not of the samples' age alone; "
            "check model.dtype and rollout.quantization"
        )

    def _constant_reward(self, metrics: Metrics) -> str | None:
        """Rewards that never differed, or that fell to one value."""
        if self.unrewarded or math.isnan(metrics["reward/std"]):  # no sample counts
            return None
        same = self.last_reward in (None, metrics["reward/mean"])
        self.last_reward = metrics["reward/mean"]
        self.rewards_differed |= metrics["reward/std"] > 0 or not same
        if metrics["reward/std"] > 0:
            self.equal_steps = 0
            return None
        self.equal_steps = self.equal_steps + 1 if same else 1
        fell = self.steps > 1 and metrics["reward/mean"] < self.reward_sum / (self.steps - 1) - DROP
        groups = self.equal_steps * self.prompts
        likely = self.rewards_differed or not metrics["outcome/ok"]
        enough = groups * self.samples >= RESPONSES if likely else groups >= FEW_GROUPS
        if self.equal_steps < IDLE_STEPS or not enough or (self.rewards_differed and not fell):
            return None
        return (
            f"all rewards were {metrics['reward/mean']:.3g} in the last {self.equal_steps} steps; check that the "
            f"verifier fits the data (rlcli verifiers audit); if it does, {without_signal(metrics, self.samples)}"
        )

    def _verifier_failures(self, metrics: Metrics) -> str | None:
        """Verifications fail because of the verifier."""
        if not self._many(self.failed):
            return None
        failed = {name: metrics.get(f"outcome/{name}", 0.0) for name in UNVERIFIED}
        by_outcome = " and ".join(f"{share:.0%} {name}" for name, share in failed.items() if share)
        share = self.failed / self.responses
        return (
            f"verifications failed ({share:.0%} of the last; in this step {by_outcome or 'none'}): those samples "
            "are left out; see the column detail in samples/"
        )

    def _verifier_overruns(self, metrics: Metrics) -> str | None:
        """Responses score 0 because their verification takes too long."""
        if not self._many(self.overran):
            return None
        return (
            f"{self.overran / self.responses:.0%} of the last responses scored 0 because their verification used up "
            "its CPU time twice: check their answers in samples/, or raise verifier.deadline_s"
        )

    def _many(self, count: float) -> bool:
        """True if `count` of the last verifications is too many."""
        return count >= FEW and count > MOST_UNVERIFIED * self.responses

    def _reference_is_policy(self, metrics: Metrics) -> str | None:
        """A reference that moves with the policy has no effect. Before the first update it equals the policy."""
        moved = self.steps >= FIRST_STEPS and self.lr_sum >= WARMED_UP * self.lr
        if not moved or metrics.get("update/kl_start") != 0.0:
            return None
        return "the KL to the reference is 0 after updates (update/kl_start): the reference is the policy itself"

    def _weights_unchanged(self, metrics: Metrics) -> str | None:
        """Updates did not change any tensor sent to the engines after them."""
        moved = metrics["update/count"] and metrics.get("update/grad_norm", 0.0) > 0
        if not moved or metrics["update/lr"] <= LEAST_LR * self.lr or metrics.get("sync/changed_tensors") != 0:
            return None
        return (
            f"{metrics['update/count']:.0f} updates at update/lr = {metrics['update/lr']:.3g} changed no tensor that "
            "was sent to the engine; the optimizer does not step, or model.dtype rounds its steps away"
        )

    def _no_response_ends(self, metrics: Metrics) -> str | None:
        """No response ends: the stop tokens are wrong, or the limit is too low."""
        responses = self.steps * self.prompts * self.samples
        if not self.endless_steps == self.steps >= FIRST_STEPS or responses < FEW_RESPONSES:
            return None
        return (
            f"every response of {self.steps} steps was cut off at rollout.max_response_tokens; check the stop tokens "
            "in --dry-run, and the limit"
        )

    def _truncated_rewarded(self, metrics: Metrics) -> str | None:
        """Responses that were cut off are rewarded."""
        if self.steps < IDLE_STEPS or self.cut_off < max(FEW, TRUNCATED * self.responses):
            return None
        share, reward = self.cut_off / self.responses, self.cut_off_reward / self.cut_off
        if not reward > max(REWARDED, metrics["reward/mean"] / 2):
            return None
        return (
            f"{share:.0%} of the last responses were cut off, and their mean score is {reward:.3g}: the model is "
            "rewarded for not ending; set train.truncated = zero_reward or mask, or raise the limit"
        )

    def _loss_scale(self, metrics: Metrics) -> str | None:
        """Compare the gradient of the loss along the advantages with its expected size. Clipped tokens have none."""
        scale = metrics.get("update/loss_scale", 1.0)
        clipped = metrics.get("update/clip_low", 0.0) + metrics.get("update/clip_high", 0.0)
        if 1 / SCALE - 2 * clipped <= scale <= SCALE:
            self.scale_steps = 0
            return None
        self.scale_steps += 1
        if self.scale_steps < 2:
            return None
        return (
            f"the gradient of the loss along the advantages is {scale:.3g} times what it should be: its sign or its "
            "denominator is wrong on some worker"
        )


def without_signal(metrics: Metrics, samples: int) -> str:
    """Advice if the `samples` of each group get equal rewards.

    >>> without_signal({"outcome/ok": 0.5}, 4).partition(": ")[0]
    'each prompt is always or never solved'
    """
    raise_samples = f"raise rollout.samples_per_prompt = {samples}"
    right = metrics.get("outcome/ok")
    if right == 1.0:
        return "every response is right: train on harder prompts (rlcli prep filter keeps those in between)"
    if right == 0.0:
        return (
            f"no response is right: train on easier prompts (rlcli prep filter), {raise_samples}, warm the model up "
            "(rlcli train sft), or check the verifier (rlcli verifiers audit)"
        )
    return f"each prompt is always or never solved: keep those in between (rlcli prep filter), or {raise_samples}"


_CHECKS: dict[str, Callable[[Warnings, Metrics], str | None]] = {
    "constant_reward": Warnings._constant_reward,
    "no_gradient": Warnings._no_gradient,
    "mismatch": Warnings._mismatch,
    "verifier_failures": Warnings._verifier_failures,
    "verifier_overruns": Warnings._verifier_overruns,
    "reference_is_policy": Warnings._reference_is_policy,
    "no_response_ends": Warnings._no_response_ends,
    "truncated_rewarded": Warnings._truncated_rewarded,
    "loss_scale": Warnings._loss_scale,
}
NO_UPDATE = "no_update"
"""The warning at the end of a run none of whose updates had a gradient."""
LOG_PROB_CHECK = "log_prob_check"
"""The warning of `rlcli.training.loop.checks.log_prob_check`, if `rollout.log_prob_check` is warn."""
FILE_EDITED = "file_edited"
"""The warning of `rlcli.launch.input_files`: a file that replaced processes read again was edited."""
NAMES = (*_CHECKS, "weights_unchanged", LOG_PROB_CHECK, NO_UPDATE, FILE_EDITED)
"""Names of all warnings, as in docs/checks.md."""
