"""An algorithm is a composition: an advantage, a policy loss, a KL term and an aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlcli.algorithms.advantages import AdvantageFunction
from rlcli.algorithms.advantages import get as get_advantage
from rlcli.algorithms.aggregation import AggregationFunction, Denominators
from rlcli.algorithms.aggregation import get as get_aggregation
from rlcli.algorithms.kl import KlFunction
from rlcli.algorithms.kl import get as get_kl
from rlcli.algorithms.losses import LossFunction, ratio
from rlcli.algorithms.losses import get as get_loss


@dataclass(frozen=True)
class Objective:
    """What one micro-batch adds to the objective of its minibatch.

    loss: scalar, ready for `.backward()`; summed over micro-batches and ranks it is the minibatch's loss. (A backend
    that averages gradients over ranks needs it multiplied by their number.)

    sums: detached float64 scalars, each a sum over this micro-batch's response tokens. Add them up over micro-batches
    and ranks, then divide by `tokens` for means. The keys depend on the algorithm alone, never on the data:
        tokens           how many response tokens were forwarded
        policy_loss      the policy loss, without the KL term
        clip_low_tokens  tokens whose gradient the lower clip stopped
        clip_high_tokens tokens whose gradient the upper clip, or the dual clip, stopped
        ratio_abs_dev    |ρ − 1|: how far the policy has moved since it generated
        kl               the KL estimate, not multiplied by its coefficient (only with a reference)
    """

    loss: Tensor
    sums: dict[str, Tensor]


@dataclass(frozen=True)
class Algorithm:
    """GRPO and its kin, made of parts.

    >>> algorithm = Algorithm.build(
    ...     advantage="grpo", loss="ppo", clip_low=0.2, clip_high=0.28, dual_clip=None,
    ...     kl_coef=0.0, kl_estimator="k3", aggregation="token-mean",
    ... )
    >>> A = algorithm.advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    >>> sequence, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])  # responses of two tokens and of one
    >>> objective = algorithm.objective(
    ...     torch.tensor([-1.0, -2.0, -3.0], requires_grad=True), None, None, A[sequence],
    ...     sequence, lengths, Denominators(tokens=3, sequences=2, max_length=4),
    ... )
    >>> f"{objective.loss.item():.4f}"  # A = ±1/√2 and ρ = 1: −(2 − 1) / √2 / 3
    '-0.2357'
    """

    advantage: AdvantageFunction
    loss: LossFunction
    kl_estimator: KlFunction
    kl_coef: float
    aggregation: AggregationFunction

    @classmethod
    def build(
        cls,
        *,
        advantage: str,
        loss: str,
        clip_low: float,
        clip_high: float,
        dual_clip: float | None,
        kl_coef: float,
        kl_estimator: str,
        aggregation: str,
    ) -> Algorithm:
        """From the names and numbers of the configuration's `algorithm` section, which holds the defaults.

        Raises `UnknownName` for a part that does not exist.
        """
        return cls(
            advantage=get_advantage(advantage),
            loss=partial(get_loss(loss), clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
            kl_estimator=get_kl(kl_estimator),
            kl_coef=kl_coef,
            aggregation=get_aggregation(aggregation),
        )

    @property
    def needs_reference(self) -> bool:
        """Whether `objective` takes reference log-probs."""
        return self.kl_coef > 0

    @property
    def has_token_terms(self) -> bool:
        """Whether a token has a gradient even where its advantage is 0, so that no sample can be skipped."""
        return self.kl_coef > 0

    def needs_old_log_probs(self, updates_per_step: int) -> bool:
        """Whether old log-probs must be computed before the first update.

        With one update the policy that trains is still the one that generated: π_old is the detached π.
        """
        return updates_per_step > 1

    def advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Advantage of each response: float [N] from rewards (finite float [N]) and group labels (int64 [N])."""
        assert rewards.shape == groups.shape, f"{tuple(rewards.shape)} rewards, {tuple(groups.shape)} groups"
        assert bool(torch.isfinite(rewards).all()), "a reward is not finite"
        return self.advantage(rewards, groups)

    def objective(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        reference_log_probs: Tensor | None,
        advantages: Tensor,
        sequence: Tensor,
        lengths: Tensor,
        denominators: Denominators,
    ) -> Objective:
        """The share of one micro-batch in aggregate(policy loss + kl_coef · KL).

        log_probs, old_log_probs, reference_log_probs, advantages: float [T], packed response tokens; only `log_probs`
        bears a gradient. `old_log_probs` of None stands for the detached `log_probs`; `reference_log_probs` is given
        exactly when `needs_reference`. sequence: int64 [T]. lengths: int64 [S]. denominators: of the whole minibatch.
        T = 0 is allowed and gives a loss of 0.
        """
        assert (reference_log_probs is not None) == self.needs_reference
        old = log_probs.detach() if old_log_probs is None else old_log_probs
        policy = self.loss(log_probs, old, advantages)
        sums = {
            "tokens": torch.ones_like(log_probs),
            "policy_loss": policy.loss,
            "clip_low_tokens": policy.clipped_low,
            "clip_high_tokens": policy.clipped_high,
            "ratio_abs_dev": (ratio(log_probs.detach(), old) - 1).abs(),
        }
        terms = policy.loss
        if reference_log_probs is not None:
            sums["kl"] = self.kl_estimator(log_probs, reference_log_probs)
            terms = terms + self.kl_coef * sums["kl"]
        return Objective(
            loss=self.aggregation(terms, sequence, lengths, denominators),
            sums={name: values.detach().sum(dtype=torch.float64) for name, values in sums.items()},
        )
