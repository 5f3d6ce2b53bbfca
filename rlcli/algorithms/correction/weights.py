"""Weights: importance weights that correct the loss from the engine's policy to the trainer's."""

from __future__ import annotations

from rlcli.algorithms.correction.base import log_ratio_of, product_of, register, within
from rlcli.algorithms.lazy import Tensor, torch


@register("none")
def none(log_probs: Tensor) -> Tensor:
    """1: trust the engine.

    >>> none(torch.tensor([-0.5, -2.0]))
    tensor([1., 1.])
    """
    return torch.ones_like(log_probs)


@register("bypass")
def bypass(log_probs: Tensor) -> Tensor:
    """1, and π_old is μ: the loss compares the policy with the engine's log-probs, ρ = π / μ.

    PPO as if the engine were the trainer's policy: the loss's own bounds limit the mismatch between engine and trainer,
    and no forward pass is needed for old log-probs. verl's `bypass_mode`; "When Speed Kills Stability" (2025).

    >>> bypass(torch.tensor([-0.5, -2.0]))
    tensor([1., 1.])
    """
    return torch.ones_like(log_probs)


@register("token_tis")
def token_tis(log_probs: Tensor, rollout_log_probs: Tensor, *, correction_cap: float = 2.0) -> Tensor:
    """min(r, cap), cap = 2: truncated importance sampling of each token.

    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).

    >>> token_tis(torch.tensor([0.5, 0.3, 0.9]).log(), torch.tensor([0.4, 0.6, 0.1]).log())  # r = 1.25, 0.5, 9
    tensor([1.2500, 0.5000, 2.0000])
    """
    return log_ratio_of(log_probs, rollout_log_probs).exp().clamp(max=correction_cap).to(log_probs.dtype)


@register("sequence_tis")
def sequence_tis(
    log_probs: Tensor, rollout_log_probs: Tensor, sequence: Tensor, lengths: Tensor, *, correction_cap: float = 2.0
) -> Tensor:
    """min(Π, cap), cap = 2, on every token of the response: unbiased except for the cap, more variance than token_tis.

    The weight is the product of the r, not a mean of them: verl's `rollout_is: sequence`, TRL's `sequence_truncate`.

    Liu, Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (2025).

    Two responses, of r = 1.25, 0.5 and of r = 9:

    >>> log_probs, rollout_log_probs = torch.tensor([0.5, 0.3, 0.9]).log(), torch.tensor([0.4, 0.6, 0.1]).log()
    >>> sequence_tis(log_probs, rollout_log_probs, torch.tensor([0, 0, 1]), torch.tensor([2, 1]))
    tensor([0.6250, 0.6250, 2.0000])
    """
    product = product_of(log_ratio_of(log_probs, rollout_log_probs), sequence, lengths)
    return product.clamp(max=correction_cap).to(log_probs.dtype)


@register("icepop")
def icepop(
    log_probs: Tensor, rollout_log_probs: Tensor, *, correction_low: float = 0.5, correction_high: float = 5.0
) -> Tensor:
    """r where low ≤ r ≤ high, else 0; low = 0.5, high = 5. IcePop of Ring-1T, arXiv 2510.18855.

    >>> icepop(torch.tensor([0.8, 0.2, 0.9]).log(), torch.tensor([0.4, 0.6, 0.1]).log())  # r = 2, 1/3, 9
    tensor([2., 0., 0.])
    """
    ratio = log_ratio_of(log_probs, rollout_log_probs).exp()
    return (ratio * within(ratio, correction_low, correction_high)).to(log_probs.dtype)


@register("sequence_icepop")
def sequence_icepop(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    *,
    correction_low: float = 0.0,
    correction_high: float = 3.0,
) -> Tensor:
    """Π where low ≤ Π ≤ high, else 0, on every token of the response; low = 0, high = 3.

    Masked importance sampling of "When Speed Kills Stability" (2025). TRL's default, `sequence_mask` with its bounds,
    and verl's `rollout_is: sequence` with two thresholds. Masked tokens stay in the denominators.

    Π = 0.625 and Π = 9:

    >>> log_probs, rollout_log_probs = torch.tensor([0.5, 0.3, 0.9]).log(), torch.tensor([0.4, 0.6, 0.1]).log()
    >>> sequence_icepop(log_probs, rollout_log_probs, torch.tensor([0, 0, 1]), torch.tensor([2, 1]))
    tensor([0.6250, 0.6250, 0.0000])
    """
    product = product_of(log_ratio_of(log_probs, rollout_log_probs), sequence, lengths)
    return (product * within(product, correction_low, correction_high)).to(log_probs.dtype)
