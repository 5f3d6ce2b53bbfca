"""Weights: importance weights that correct the loss from the engine's policy to the trainer's."""

from __future__ import annotations

from rlcli.algorithms.correction.base import log_ratio, product_of, register, within
from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.lazy import Tensor, torch

POLICIES = ("old_log_probs", "rollout_log_probs")
"""The columns of which every ratio is made."""


@register("none", needs=("old_log_probs",))
def none(inputs: LossInputs) -> Tensor:
    """1: trust the engine.

    >>> none(LossInputs(old_log_probs=torch.tensor([-0.5, -2.0])))
    tensor([1., 1.])
    """
    return torch.ones_like(inputs.old_log_probs)


@register("bypass", needs=("old_log_probs",))
def bypass(inputs: LossInputs) -> Tensor:
    """1, and π_old is μ: the loss compares the policy with the engine's log-probs, ρ = π / μ.

    PPO as if the engine were the trainer's policy: the loss's own bounds limit the mismatch between engine and trainer,
    and no forward pass is needed for old log-probs. verl's `bypass_mode`; "When Speed Kills Stability" (2025).

    >>> bypass(LossInputs(old_log_probs=torch.tensor([-0.5, -2.0])))
    tensor([1., 1.])
    """
    return torch.ones_like(inputs.old_log_probs)


@register("token_tis", needs=POLICIES)
def token_tis(inputs: LossInputs, *, correction_cap: float = 2.0) -> Tensor:
    """min(r, cap), cap = 2: truncated importance sampling of each token.

    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).

    >>> old, rollout = torch.tensor([0.5, 0.3, 0.9]).log(), torch.tensor([0.4, 0.6, 0.1]).log()  # r = 1.25, 0.5, 9
    >>> token_tis(LossInputs(old_log_probs=old, rollout_log_probs=rollout))
    tensor([1.2500, 0.5000, 2.0000])
    """
    return log_ratio(inputs).exp().clamp(max=correction_cap).to(inputs.old_log_probs.dtype)


@register("sequence_tis", needs=(*POLICIES, "sequence", "lengths"))
def sequence_tis(inputs: LossInputs, *, correction_cap: float = 2.0) -> Tensor:
    """min(Π, cap), cap = 2, on every token of the response: unbiased except for the cap, more variance than token_tis.

    The weight is the product of the r, not a mean of them: verl's `rollout_is: sequence`, TRL's `sequence_truncate`.

    Liu, Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (2025).

    Two responses, of r = 1.25, 0.5 and of r = 9:

    >>> old, rollout = torch.tensor([0.5, 0.3, 0.9]).log(), torch.tensor([0.4, 0.6, 0.1]).log()
    >>> sequence, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    >>> sequence_tis(LossInputs(old_log_probs=old, rollout_log_probs=rollout, sequence=sequence, lengths=lengths))
    tensor([0.6250, 0.6250, 2.0000])
    """
    product = product_of(log_ratio(inputs), inputs.sequence, inputs.lengths)
    return product.clamp(max=correction_cap).to(inputs.old_log_probs.dtype)


@register("icepop", needs=POLICIES)
def icepop(inputs: LossInputs, *, correction_low: float = 0.5, correction_high: float = 5.0) -> Tensor:
    """r where low ≤ r ≤ high, else 0; low = 0.5, high = 5. IcePop of Ring-1T, arXiv 2510.18855.

    >>> old, rollout = torch.tensor([0.8, 0.2, 0.9]).log(), torch.tensor([0.4, 0.6, 0.1]).log()  # r = 2, 1/3, 9
    >>> icepop(LossInputs(old_log_probs=old, rollout_log_probs=rollout))
    tensor([2., 0., 0.])
    """
    ratio = log_ratio(inputs).exp()
    return (ratio * within(ratio, correction_low, correction_high)).to(inputs.old_log_probs.dtype)


@register("sequence_icepop", needs=(*POLICIES, "sequence", "lengths"))
def sequence_icepop(inputs: LossInputs, *, correction_low: float = 0.0, correction_high: float = 3.0) -> Tensor:
    """Π where low ≤ Π ≤ high, else 0, on every token of the response; low = 0, high = 3.

    Masked importance sampling of "When Speed Kills Stability" (2025). TRL's default, `sequence_mask` with its bounds,
    and verl's `rollout_is: sequence` with two thresholds. Masked tokens stay in the denominators.

    Π = 0.625 and Π = 9:

    >>> old, rollout = torch.tensor([0.5, 0.3, 0.9]).log(), torch.tensor([0.4, 0.6, 0.1]).log()
    >>> sequence, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    >>> sequence_icepop(LossInputs(old_log_probs=old, rollout_log_probs=rollout, sequence=sequence, lengths=lengths))
    tensor([0.6250, 0.6250, 0.0000])
    """
    product = product_of(log_ratio(inputs), inputs.sequence, inputs.lengths)
    return (product * within(product, correction_low, correction_high)).to(inputs.old_log_probs.dtype)
