"""Models that are trained on the same batch as the policy: PPO's critic, and PRIME's process reward model."""

from __future__ import annotations

from rlcli.config.schema import RunConfig
from rlcli.training.worker.backend import Loader
from rlcli.training.worker.train_batch import TrainBatch


class CriticRole:
    """A value model: computes `values`, and is trained on `returns`."""

    def __init__(self, config: RunConfig, load: Loader) -> None:
        self.clip = config.critic.clip
        self.model = load("value", config.critic.path or config.model.path)

    def infer(self, batch: TrainBatch) -> None:
        """Compute the value of the state before each token, as the batch's tokens `values`."""
        for micro in batch:
            micro.tokens.values = self.model.values(micro.packed)

    def update(self, batch: TrainBatch, index: int, lr: float) -> dict[str, float]:
        """One optimizer step on Σ value_loss / tokens. Returns sums over this rank's tokens: `tokens`, `loss`,
        `clipped`, and for the returns R and the errors R − V their sums and the sums of their squares."""
        import torch

        from rlcli.algorithms.losses.critic import value_loss

        for micro, outputs in self.model.forward(batch.minibatches[index]):
            values, returns = outputs.values, micro.tokens.returns
            term = value_loss(values, micro.tokens.values, returns, clip=self.clip)
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
            self.model.backward(term.loss.sum() / max(batch.minibatch_counts[index].tokens, 1), totals)
        return self.model.step(lr)


class ProcessRewardRole:
    """An implicit process reward model: computes `process_rewards`, and is trained on the responses' verdicts."""

    def __init__(self, config: RunConfig, load: Loader) -> None:
        self.options = config.algorithm.options
        self.temperature = config.rollout.temperature
        self.model = load("policy", config.critic.path or config.model.path)

    def infer(self, batch: TrainBatch) -> None:
        """Compute the implicit reward of each token, as the batch's tokens `process_rewards`."""
        from rlcli.algorithms.function_registry import chosen_options
        from rlcli.algorithms.losses.critic import process_rewards

        options = chosen_options(process_rewards, self.options)
        for micro in batch:
            log_probs = self.model.log_probs(micro.packed, self.temperature)
            micro.tokens.process_rewards = process_rewards(log_probs, micro.tokens.reference_log_probs, **options)

    def update(self, batch: TrainBatch, index: int, lr: float) -> dict[str, float]:
        """One optimizer step on the mean cross-entropy of the responses' verdicts. Returns sums over this rank's
        responses: `responses`, `loss` and `agree`, how often the model predicted the verdict."""
        import torch

        from rlcli.algorithms.function_registry import chosen_options
        from rlcli.algorithms.losses.base import sequence_sums
        from rlcli.algorithms.losses.critic import implicit_reward_loss

        options = chosen_options(implicit_reward_loss, self.options)
        minibatch = batch.minibatches[index]
        for micro, outputs in self.model.forward(minibatch, temperature=self.temperature, want_entropy=False):
            log_probs, reference = outputs.log_probs, micro.tokens.reference_log_probs
            right = batch.columns.right[micro.samples].double()
            term = implicit_reward_loss(log_probs, reference, right, micro.packed.sequence, micro.lengths, **options)
            total = (term.loss / micro.lengths[micro.packed.sequence]).sum()
            drift = log_probs.detach() - reference
            agree = (sequence_sums(drift, micro.packed.sequence, micro.lengths) > 0) == (right > 0.5)
            sums = {"responses": torch.ones_like(right), "loss": total.detach(), "agree": agree}
            totals = {name: value.sum(dtype=torch.float64) for name, value in sums.items()}
            self.model.backward(total / batch.minibatch_counts[index].sequences, totals)
        return self.model.step(lr)
