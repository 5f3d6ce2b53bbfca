"""Losses that keep each token separately near the policy that generated it."""

from __future__ import annotations

from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.lazy import Tensor, torch
from rlcli.algorithms.losses.base import TokenLoss, loss_functions, ratio, unclipped

USED = ("log_probs", "old_log_probs", "advantages")
"""The columns that each of these losses reads."""


def clipped_surrogate(rho: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """max(−Aρ, −A·clip(ρ, 1 − clip_low, 1 + clip_high)) of ratios ρ, float [R], that carry the gradient.

    `clipped_low` is A < 0 with ρ < 1 − clip_low; `clipped_high` is A > 0 with ρ > 1 + clip_high.

    >>> clipped_surrogate(torch.tensor([1.5, 0.5]), torch.tensor([1.0, 1.0]), 0.2, 0.2).loss
    tensor([-1.2000, -0.5000])
    """
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss = torch.maximum(-advantages * rho, -advantages * rho.clamp(low, high))
    return TokenLoss(loss, (advantages < 0) & (rho < low), (advantages > 0) & (rho > high))


@loss_functions.register("ppo", needs=USED)
def ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """max(−Aρ, −A·clip(ρ, 1 − clip_low, 1 + clip_high)); where A < 0, at most −A·dual_clip.

    PPO, arXiv 1707.06347; unequal clips, DAPO, arXiv 2503.14476; the bound for A < 0, dual-clip PPO, arXiv 1912.09729.
    `clipped_low` is A < 0 with ρ < 1 − clip_low; `clipped_high` is A > 0 with ρ > 1 + clip_high, or A < 0 with
    ρ > dual_clip. Their gradient is 0.

    With A = 1 a ratio of 1.5 counts as 1.2; with A = −1 a ratio of 0.5 counts as 0.8, and one of 5 in full unless
    there is a dual clip:

    >>> log_probs, advantages = torch.tensor([1.5, 0.5, 5.0]).log(), torch.tensor([1.0, -1.0, -1.0])
    >>> inputs = LossInputs(log_probs=log_probs, old_log_probs=torch.zeros(3), advantages=advantages)
    >>> term = ppo(inputs)
    >>> term.loss, term.clipped_low.tolist(), term.clipped_high.tolist()
    (tensor([-1.2000,  0.8000,  5.0000]), [False, True, False], [True, False, False])
    >>> ppo(inputs, dual_clip=3.0).loss
    tensor([-1.2000,  0.8000,  3.0000])
    """
    advantages, rho = inputs.advantages, ratio(inputs.log_probs, inputs.old_log_probs)
    term = clipped_surrogate(rho, advantages, clip_low, clip_high)
    if dual_clip is None:
        return term
    worse = advantages < 0
    loss = torch.where(worse, torch.minimum(term.loss, -advantages * dual_clip), term.loss)
    return TokenLoss(loss, term.clipped_low, term.clipped_high | (worse & (rho > dual_clip)))


@loss_functions.register("cispo", needs=USED)
def cispo(
    inputs: LossInputs,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.2,
) -> TokenLoss:
    """−sg(clip(ρ, 1 − clip_low, 1 + clip_high))·A·log π, sg: without gradient.

    CISPO of MiniMax-M1, arXiv 2506.13585: the weight is clipped, not the update, so every token keeps a gradient.
    The paper omits the lower bound (clip_low = 1) and does not print its upper one; 0.2 is that of verl's
    example. `clipped_low` and `clipped_high` are the tokens whose weight was clipped, whatever A.

    With log π = −2 and A = 1, a ratio of e^−1 = 0.3679 counts in full and one of e = 2.718 as 1.2:

    >>> log_probs, old_log_probs = torch.tensor([-2.0, -2.0]), torch.tensor([-1.0, -3.0])
    >>> term = cispo(LossInputs(log_probs=log_probs, old_log_probs=old_log_probs, advantages=torch.ones(2)))
    >>> term.loss, term.clipped_high.tolist()
    (tensor([0.7358, 2.4000]), [False, True])
    """
    rho = ratio(inputs.log_probs, inputs.old_log_probs).detach()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    return TokenLoss(-rho.clamp(low, high) * inputs.advantages * inputs.log_probs, rho < low, rho > high)


@loss_functions.register("sapo", needs=USED)
def sapo(
    inputs: LossInputs,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> TokenLoss:
    """−A·(4/τ)·σ(τ(ρ − 1)), τ = tau_positive where A > 0, else tau_negative.

    SAPO, arXiv 2511.20347: a gate that closes smoothly as ρ leaves 1, instead of a clip. At ρ = 1 its gradient is that
    of −Aρ.

    >>> advantages = torch.tensor([1.0, -1.0])
    >>> inputs = LossInputs(log_probs=torch.zeros(2), old_log_probs=torch.zeros(2), advantages=advantages)
    >>> sapo(inputs).loss  # −4·σ(0) and 4/1.05·σ(0)
    tensor([-2.0000,  1.9048])
    >>> sapo(inputs.replace(log_probs=torch.tensor([2.0, 2.0]).log())).loss  # −4·σ(1) and 4/1.05·σ(1.05)
    tensor([-2.9242,  2.8220])
    """
    advantages, rho = inputs.advantages, ratio(inputs.log_probs, inputs.old_log_probs)
    tau = torch.where(advantages > 0, tau_positive, torch.full_like(rho, tau_negative))
    return unclipped(-advantages * torch.sigmoid(tau * (rho - 1.0)) * 4.0 / tau)


@loss_functions.register("dppo_tv", needs=USED)
def dppo_tv(
    inputs: LossInputs,
    *,
    clip_low: float = 0.15,
    clip_high: float = 0.15,
) -> TokenLoss:
    """−Aρ, but 0 where A > 0 and π − π_old > clip_high, or A < 0 and π_old − π > clip_low.

    DPPO with its binary total variation, arXiv 2602.04879; 0.15 is the bound that its authors use. It bounds the change
    of the token's probability, not of its ratio: a rare token may become many times as likely, a frequent one may not
    lose half of its mass. `clipped_low` and `clipped_high` are the tokens with loss 0.

    From 0.01 to 0.04 is a small step although ρ = 4; from 0.5 to 0.75 is a large one although ρ = 1.5:

    >>> log_probs, old_log_probs = torch.tensor([0.04, 0.75]).log(), torch.tensor([0.01, 0.5]).log()
    >>> term = dppo_tv(LossInputs(log_probs=log_probs, old_log_probs=old_log_probs, advantages=torch.ones(2)))
    >>> term.loss.round(decimals=4) + 0.0, term.clipped_high.tolist()
    (tensor([-4.,  0.]), [False, True])
    """
    log_probs, old_log_probs, advantages = inputs.log_probs, inputs.old_log_probs, inputs.advantages
    rise = (log_probs.exp() - old_log_probs.exp()).detach()
    clipped_low = (advantages < 0) & (rise < -clip_low)
    clipped_high = (advantages > 0) & (rise > clip_high)
    loss = -advantages * ratio(log_probs, old_log_probs)
    return TokenLoss(torch.where(clipped_low | clipped_high, 0.0, loss), clipped_low, clipped_high)
