"""Policy losses: one term for each response token.

Every function takes `log_probs` (float [T], log π of the tokens, with gradient), `old_log_probs` (float [T], log π_old,
the behaviour policy as the trainer computes it) and `advantages` (float [T], A of each token's response), and returns
a `TokenLoss`. ρ = π / π_old.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcli.algorithms.named import Named


@dataclass(frozen=True)
class TokenLoss:
    """loss: float [T]. clipped_low, clipped_high: bool [T], where a lower or an upper bound of ρ stops the gradient."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


LossFunction = Callable[..., TokenLoss]

_loss: Named[LossFunction] = Named("policy loss")
get = _loss.get
names = _loss.names
register = _loss.register


def ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """ρ = exp(clamp(log π − log π_old, ±20)), float [T]: finite, and without gradient beyond the clamp.

    >>> ratio(torch.tensor([0.0, -1.0, 500.0]), torch.tensor([0.0, 0.0, 0.0]))
    tensor([1.0000e+00, 3.6788e-01, 4.8517e+08])
    """
    return (log_probs - old_log_probs).clamp(-20.0, 20.0).exp()


@_loss.register("ppo")
def ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """max(−Aρ, −A·clip(ρ, 1 − clip_low, 1 + clip_high)); where A < 0, at most −A·dual_clip.

    PPO, arXiv 1707.06347; unequal clips, DAPO, arXiv 2503.14476; the bound for A < 0, dual-clip PPO, arXiv 1912.09729.
    `clipped_low` is A < 0 with ρ < 1 − clip_low; `clipped_high` is A > 0 with ρ > 1 + clip_high, or A < 0 with
    ρ > dual_clip.

    With A = 1 a ratio of 1.5 counts as 1.2; with A = −1 a ratio of 0.5 counts as 0.8, and one of 5 in full unless
    there is a dual clip:

    >>> log_probs, advantages = torch.tensor([1.5, 0.5, 5.0]).log(), torch.tensor([1.0, -1.0, -1.0])
    >>> term = ppo(log_probs, torch.zeros(3), advantages)
    >>> term.loss, term.clipped_low.tolist(), term.clipped_high.tolist()
    (tensor([-1.2000,  0.8000,  5.0000]), [False, True, False], [True, False, False])
    >>> ppo(log_probs, torch.zeros(3), advantages, dual_clip=3.0).loss
    tensor([-1.2000,  0.8000,  3.0000])
    """
    rho = ratio(log_probs, old_log_probs)
    loss = torch.maximum(-advantages * rho, -advantages * rho.clamp(1.0 - clip_low, 1.0 + clip_high))
    worse, better = advantages < 0, advantages > 0
    clipped_low = worse & (rho < 1.0 - clip_low)
    clipped_high = better & (rho > 1.0 + clip_high)
    if dual_clip is not None:
        loss = torch.where(worse, torch.minimum(loss, -advantages * dual_clip), loss)
        clipped_high = clipped_high | (worse & (rho > dual_clip))
    return TokenLoss(loss, clipped_low, clipped_high)
