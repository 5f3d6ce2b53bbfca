"""Models that learn from the same batch as the policy: PPO's critic, and PRIME's process reward model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlcli.cluster.watchdog import progress
from rlcli.config.schema import RunConfig
from rlcli.workers.roles.batch import MicroBatch, TrainBatch
from rlcli.workers.roles.learner import Learner
from rlcli.workers.roles.policy import log_probs_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class CriticRole:
    """A value model: fills in `values`, and learns `returns`."""

    def __init__(self, config: RunConfig, dtype: torch.dtype, device: torch.device, mesh: Any) -> None:
        from rlcli.model.io.loading import load_value

        self.clip = config.critic.clip
        self.model = _load(load_value, config, dtype, device, mesh)
        self.learner = Learner(self.model, config, config.critic.lr)

    def infer(self, batch: TrainBatch) -> None:
        """Compute the value of the state before each token, as the batch's tokens `values`."""
        import torch

        for micro in batch:
            progress()
            with torch.no_grad():
                micro.tokens["values"] = self.model(micro.packed).values

    def update(self, batch: TrainBatch, index: int, lr: float) -> dict[str, float]:
        """One optimizer step on Σ value_loss / tokens. Returns sums over this rank's tokens: `tokens`, `loss`,
        `clipped`, and for the returns R and the errors R − V their sums and the sums of their squares."""

        def loss(micro: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            import torch

            from rlcli.algorithms.losses import value_loss

            values = self.model(micro.packed).values
            if micro.empty:
                return values, values.sum(), {}
            returns = micro.tokens["returns"]
            term = value_loss(values, micro.tokens["values"], returns, clip=self.clip)
            errors = returns - values.detach()
            sums = {
                "tokens": torch.ones_like(errors),
                "loss": term.loss.detach(),
                "clipped": term.clipped_low | term.clipped_high,
                "returns": returns,
                "returns_sq": returns.double().square(),
                "errors": errors,
                "errors_sq": errors.double().square(),
            }
            totals = {name: value.sum(dtype=torch.float64) for name, value in sums.items()}
            return values, term.loss.sum() / max(batch.works[index].tokens, 1), totals

        return self.learner.update(batch.minibatches[index], loss, lr)


class ProcessRewardRole:
    """An implicit process reward model: fills in `process_rewards`, and learns which responses are correct."""

    def __init__(self, config: RunConfig, dtype: torch.dtype, device: torch.device, mesh: Any) -> None:
        from rlcli.model.io.loading import load_policy

        self.options = config.algorithm.options
        self.temperature = config.rollout.temperature
        self.model = _load(load_policy, config, dtype, device, mesh)
        self.learner = Learner(self.model, config, config.critic.lr)

    def infer(self, batch: TrainBatch) -> None:
        """Compute the implicit reward of each token, as the batch's tokens `process_rewards`."""
        from rlcli.algorithms.losses import process_rewards
        from rlcli.algorithms.named import call

        for micro in batch:
            log_probs = log_probs_of(self.model, micro, self.temperature)
            inputs = {"log_probs": log_probs, "reference_log_probs": micro.tokens["reference_log_probs"]}
            micro.tokens["process_rewards"] = call(process_rewards, inputs, self.options)

    def update(self, batch: TrainBatch, index: int, lr: float) -> dict[str, float]:
        """One optimizer step on the mean cross-entropy of the responses' verdicts. Returns sums over this rank's
        responses: `responses`, `loss` and `agree`, how often the model predicted the verdict."""

        def loss(micro: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            import torch

            from rlcli.algorithms.losses import implicit_reward_loss
            from rlcli.algorithms.losses.base import sequence_sums
            from rlcli.algorithms.named import call

            log_probs = self.model(micro.packed, temperature=self.temperature, want_entropy=False).log_probs
            if micro.empty:
                return log_probs, log_probs.sum(), {}
            right = batch.of(micro, "right").double()
            inputs = {
                "log_probs": log_probs,
                "reference_log_probs": micro.tokens["reference_log_probs"],
                "rewards": right,
                "sequence": micro.packed.sequence,
                "lengths": micro.lengths,
            }
            terms = call(implicit_reward_loss, inputs, self.options).loss
            total = (terms / micro.lengths[micro.packed.sequence]).sum()
            drift = log_probs.detach() - micro.tokens["reference_log_probs"]
            agree = (sequence_sums(drift, micro.packed.sequence, micro.lengths) > 0) == (right > 0.5)
            sums = {"responses": torch.ones_like(right), "loss": total.detach(), "agree": agree}
            totals = {name: value.sum(dtype=torch.float64) for name, value in sums.items()}
            return log_probs, total / batch.works[index].sequences, totals

        return self.learner.update(batch.minibatches[index], loss, lr)


def _load(load: Callable[..., Any], config: RunConfig, dtype: torch.dtype, device: torch.device, mesh: Any) -> Any:
    """The critic's model, by default loaded from the policy's path."""
    return load(
        config.critic.path or config.model.path,
        dtype=dtype,
        device=device,
        mesh=mesh,
        gradient_checkpointing=config.model.gradient_checkpointing,
        compiled=config.model.compile,
    )
