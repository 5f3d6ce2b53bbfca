"""Losses of the models next to the policy: the critic's values, and an implicit process reward model."""

from __future__ import annotations

from rlcli.algorithms.lazy import Tensor, torch
from rlcli.algorithms.losses.base import TokenLoss, sequence_sums, unclipped


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> TokenLoss:
    """½·max((v − R)², (clip(v, v_old − clip, v_old + clip) − R)²); ½·(v − R)² with a clip of None. All float [R].

    The value loss of PPO2, OpenAI Baselines' PPO (arXiv 1707.06347 itself does not clip it): values that have moved
    further than `clip` towards R have gradient 0. `clipped_low` and `clipped_high` are those below and above the range.

    R = 3: from 0 to 2 is further than 0.5, so it counts as 0.5: ½·2.5²; from 0 to −1 is further away from R: ½·4²:

    >>> term = value_loss(torch.tensor([2.0, -1.0]), torch.zeros(2), torch.tensor([3.0, 3.0]), clip=0.5)
    >>> term.loss, term.clipped_low.tolist(), term.clipped_high.tolist()
    (tensor([3.1250, 8.0000]), [False, False], [True, False])
    >>> value_loss(torch.tensor([2.0]), torch.zeros(1), torch.tensor([3.0]), clip=None).loss
    tensor([0.5000])
    """
    errors = (values - returns).square()
    if clip is None:
        return unclipped(errors / 2)
    held = values.clamp(old_values - clip, old_values + clip)
    held_errors = (held - returns).square()
    clipped = held_errors > errors
    return TokenLoss(torch.maximum(errors, held_errors) / 2, clipped & (values < held), clipped & (values > held))


def process_rewards(log_probs: Tensor, reference_log_probs: Tensor, *, beta: float = 0.05) -> Tensor:
    """β(log π_prm − log π_ref), float [R]: the reward of each token by an implicit process reward model.

    PRIME, arXiv 2502.01456. That the log-ratio of a language model to its reference is a reward: arXiv 2412.01981.

    >>> process_rewards(torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -1.0]))
    tensor([ 0.1000, -0.0500])
    """
    return beta * (log_probs - reference_log_probs)


def implicit_reward_loss(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    rewards: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    *,
    beta: float = 0.05,
) -> TokenLoss:
    """−r·log σ(z) − (1 − r)·log σ(−z), z = Σ_t of `process_rewards`, on each token of the response.

    rewards: float [S], r: 1 for a right response, 0 for a wrong one, or between. PRIME, arXiv 2502.01456. Each
    token has its response's loss, as in the sequence losses: aggregate by seq-mean-token-mean.

    z = 0.05·20 = 1 for a right response and for a wrong one: −log σ(1) and −log σ(−1):

    >>> sequence, lengths, rewards = torch.tensor([0, 0, 1]), torch.tensor([2, 1]), torch.tensor([1.0, 0.0])
    >>> log_probs = torch.tensor([-1.0, -1.0, -2.0])
    >>> implicit_reward_loss(log_probs, torch.tensor([-9.0, -13.0, -22.0]), rewards, sequence, lengths).loss
    tensor([0.3133, 0.3133, 1.3133])
    """
    scores = sequence_sums(process_rewards(log_probs, reference_log_probs, beta=beta), sequence, lengths)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(scores, rewards.double(), reduction="none")
    return unclipped(losses.to(log_probs.dtype)[sequence])
