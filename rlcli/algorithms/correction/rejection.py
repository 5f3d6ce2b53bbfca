"""Rejections: tokens too far from the engine's policy leave the minibatch, both numerator and denominators.

The bounds are those of r = π / μ, as in the papers. verl defines its bounds for μ / π: its `lower_upper` is
correction_low = 1 / upper and correction_high = 1 / lower here.
"""

from __future__ import annotations

from rlcli.algorithms.correction.base import log_ratio, log_ratio_of, mean_of, product_of, register, within
from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.lazy import Tensor, torch

POLICIES = ("old_log_probs", "rollout_log_probs")
"""The columns of which every ratio is made."""


@register("token_mask", needs=POLICIES, rejects=True)
def token_mask(inputs: LossInputs, *, correction_low: float = 0.5, correction_high: float = 2.0) -> Tensor:
    """Rejects tokens unless low ≤ r ≤ high; low = 0.5, high = 2. The others have weight 1.

    Rejection by token, of Liu, Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch" (2025); verl's `token_k1`.

    >>> old, rollout = torch.tensor([0.5, 0.2, 0.9]).log(), torch.tensor([0.4, 0.6, 0.1]).log()  # r = 1.25, 1/3, 9
    >>> token_mask(LossInputs(old_log_probs=old, rollout_log_probs=rollout))
    tensor([1., 0., 0.])
    """
    return within(log_ratio(inputs).exp(), correction_low, correction_high).to(inputs.old_log_probs.dtype)


@register("sequence_mask", needs=(*POLICIES, "sequence", "lengths"), rejects=True)
def sequence_mask(inputs: LossInputs, *, correction_low: float = 0.5, correction_high: float = 2.0) -> Tensor:
    """Rejects responses unless low ≤ Π ≤ high; low = 0.5, high = 2. The others have weight 1.

    Rejection by response, of Liu, Li et al., "When Speed Kills Stability" (2025); verl's `seq_sum_k1`, including its
    bounds. Π drifts with the length, so this rejects most long responses; the geometric mean does not.

    Π = 0.625 and Π = 9:

    >>> old, rollout = torch.tensor([0.5, 0.3, 0.9]).log(), torch.tensor([0.4, 0.6, 0.1]).log()
    >>> sequence, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    >>> sequence_mask(LossInputs(old_log_probs=old, rollout_log_probs=rollout, sequence=sequence, lengths=lengths))
    tensor([1., 1., 0.])
    """
    product = product_of(log_ratio(inputs), inputs.sequence, inputs.lengths)
    return within(product, correction_low, correction_high).to(inputs.old_log_probs.dtype)


@register("geometric_mask", needs=(*POLICIES, "sequence", "lengths"), rejects=True)
def geometric_mask(
    inputs: LossInputs, *, correction_low: float = 1 / 1.001, correction_high: float = 1 / 0.999
) -> Tensor:
    """Rejects responses unless low ≤ G ≤ high; low = 1/1.001, high = 1/0.999. The others have weight 1.

    Like `sequence_mask`, but independent of the length; the bounds are tight because a mean varies little. verl's
    `seq_mean_k1`, whose 0.999 and 1.001 are bounds of 1/G.

    G = √(1.25 · 0.8) = 1 and G = 1.01:

    >>> old, rollout = torch.tensor([0.5, 0.4, 0.505]).log(), torch.tensor([0.4, 0.5, 0.5]).log()
    >>> sequence, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    >>> geometric_mask(LossInputs(old_log_probs=old, rollout_log_probs=rollout, sequence=sequence, lengths=lengths))
    tensor([1., 1., 0.])
    """
    mean = mean_of(log_ratio(inputs), inputs.sequence, inputs.lengths).exp()
    return within(mean, correction_low, correction_high).to(inputs.old_log_probs.dtype)


@register("off_policy_mask", needs=("log_probs", "rollout_log_probs", "advantages", "sequence", "lengths"))
def off_policy_mask(inputs: LossInputs, *, off_policy_threshold: float = 0.5) -> Tensor:
    """0 where A < 0 and mean_t(log μ − log π) of the response > threshold, else 1; threshold = 0.5.

    Off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556 eq. 9: a wrong response that the policy would now
    hardly generate has nothing to teach it. π is the policy in this update, so the mask is recomputed in each update.
    The tokens stay in the denominators, as in the paper, so this rejects nothing. The paper does not print its
    threshold; 0.5 is TRL's example. It is usually combined with weights: token_tis * off_policy_mask.

    The mean of log μ − log π is ln 4 / 2 = 0.69 in the first two responses, of A = −1 and A = 1, and 0.1 in the last:

    >>> policy, rollout = torch.tensor([-1.0, -2.3863, -1.0, -2.3863, -0.6]), torch.tensor([-1.0] * 4 + [-0.5])
    >>> advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0])
    >>> inputs = LossInputs(
    ...     log_probs=policy, rollout_log_probs=rollout, advantages=advantages,
    ...     sequence=torch.tensor([0, 0, 1, 1, 2]), lengths=torch.tensor([2, 2, 1]),
    ... )
    >>> off_policy_mask(inputs)
    tensor([0., 0., 1., 1., 1.])
    """
    drift = log_ratio_of(inputs.log_probs, inputs.rollout_log_probs)
    divergence = -mean_of(drift, inputs.sequence, inputs.lengths)
    masked = (inputs.advantages < 0) & (divergence > off_policy_threshold)
    return torch.where(masked, 0.0, torch.ones_like(inputs.log_probs.detach()))
