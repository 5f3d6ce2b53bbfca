"""Losses of whole sequences.

Each token of a sequence has the sequence's loss, so that the aggregation seq-mean-token-mean gives the mean over
sequences of the papers. An empty response has no token and adds nothing.
"""

from __future__ import annotations

from rlcli.algorithms.lazy import Tensor, torch
from rlcli.algorithms.losses.base import TokenLoss, loss_functions, ratio, sequence_sums, unclipped
from rlcli.algorithms.losses.clipped import clipped_surrogate


@loss_functions.register("gspo")
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """max(−As, −A·clip(s, 1 − clip_low, 1 + clip_high)), s = exp(mean_t(log π − log π_old)) of the token's sequence.

    GSPO, arXiv 2507.18071, in its token form: the value is s, but the gradient is s·∇log π of the token itself. With
    one A a response and seq-mean-token-mean, that is the sequence form; tokens may also have different A. The clip acts
    on whole sequences: `clipped_low` and `clipped_high` are all tokens of those, as in PPO.

    The first response's ratio is e^((0.6 − 0.2)/2) = 1.2214, of which 1.0004 counts; the second's is 1:

    >>> sequence, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    >>> term = gspo(torch.tensor([0.6, -0.2, 0.0]), torch.zeros(3), torch.ones(3), sequence, lengths)
    >>> term.loss, term.clipped_high.tolist()
    (tensor([-1.0004, -1.0004, -1.0000]), [True, True, False])
    """
    means = sequence_sums((log_probs - old_log_probs).detach(), sequence, lengths) / lengths.clamp(min=1)
    # The difference is exactly 0: the value is s to the last digit, as bounds of 3e-4 need; the gradient is s·∇log π.
    rho = ratio(log_probs - log_probs.detach(), -means.to(log_probs.dtype)[sequence])
    return clipped_surrogate(rho, advantages, clip_low, clip_high)


@loss_functions.register("gmpo")
def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    weights: Tensor | None = None,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLoss:
    """−A·exp(mean_t d_t), d_t = min(log ρ_t, clip_high) where A > 0, max(log ρ_t, −clip_low) where A < 0.

    GMPO, arXiv 2507.20673: PPO with the geometric mean of the token ratios instead of the arithmetic one. The bounds
    are those of log ρ and apply to each token: `clipped_low` is A < 0 with log ρ < −clip_low, `clipped_high` is A > 0
    with log ρ > clip_high. weights: those of the correction, float [T]; a response's weight is their geometric mean,
    like its ratio (as in verl; a weight counts as at least 1e-10).

    Log-ratios 1 and 0 with A = 1 count as 0.4 and 0: −e^0.2; −1 and 0 with A = −1 as −0.4 and 0: e^−0.2:

    >>> sequence, lengths = torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2])
    >>> advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    >>> gmpo(torch.tensor([1.0, 0.0, -1.0, 0.0]), torch.zeros(4), advantages, sequence, lengths).loss
    tensor([-1.2214, -1.2214,  0.8187,  0.8187])

    Weights of 2 and 0.5 combine to 1, and of 2 and 2 to 2:

    >>> weights = torch.tensor([2.0, 0.5, 2.0, 2.0])
    >>> gmpo(torch.tensor([1.0, 0.0, -1.0, 0.0]), torch.zeros(4), advantages, sequence, lengths, weights).loss
    tensor([-1.2214, -1.2214,  1.6375,  1.6375])
    """
    log_ratio = log_probs - old_log_probs
    clipped_low = (advantages < 0) & (log_ratio < -clip_low)
    clipped_high = (advantages > 0) & (log_ratio > clip_high)
    held = torch.where(clipped_low, -clip_low, torch.where(clipped_high, clip_high, log_ratio))
    means = (sequence_sums(held, sequence, lengths) / lengths.clamp(min=1)).to(log_probs.dtype)
    loss = -advantages * ratio(means, torch.zeros_like(means))[sequence]
    if weights is not None:
        logs = sequence_sums(weights.double().clamp(min=1e-10).log(), sequence, lengths)
        loss = loss * (logs / lengths.clamp(min=1)).exp().to(loss.dtype)[sequence]
    return TokenLoss(loss, clipped_low, clipped_high)


@loss_functions.register("dpo")
def dpo(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    pairs: Tensor,
    *,
    beta: float = 0.1,
) -> TokenLoss:
    """−log σ(β(h_w − h_l)), h = Σ_t(log π − log π_ref), on each token of the two responses of a pair.

    DPO, arXiv 2305.18290. pairs: int64 [S]; two sequences of equal label are a pair, and both must be here. The sign of
    A (only the sign counts) distinguishes them: > 0 the preferred one, w; < 0 the other, l. The mean over sequences is
    the mean over pairs: if one response of a pair is empty (its h is 0), the other one carries the loss of both.

    h is 1 and −1, so −log σ(0.1·2) = 0.5981:

    >>> sequence, lengths, pairs = torch.tensor([0, 0, 1]), torch.tensor([2, 1]), torch.tensor([7, 7])
    >>> log_probs, reference = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.5, -1.5, -1.0])
    >>> dpo(log_probs, reference, torch.tensor([1.0, 1.0, -1.0]), sequence, lengths, pairs).loss
    tensor([0.5981, 0.5981, 0.5981])
    """
    labels, pair, members = torch.unique(pairs, return_inverse=True, return_counts=True)
    assert bool((members == 2).all()), f"pairs of other than two sequences: {labels[members != 2].tolist()}"
    signed = advantages.sign() * (log_probs - reference_log_probs)
    margins = torch.zeros(labels.shape, dtype=torch.float64, device=log_probs.device)
    margins = margins.index_add(0, pair, sequence_sums(signed, sequence, lengths))
    speaking = torch.zeros_like(margins).index_add(0, pair, (lengths > 0).double()).clamp(min=1.0)
    losses = -torch.nn.functional.logsigmoid(beta * margins) * 2.0 / speaking
    return unclipped(losses.to(log_probs.dtype)[pair[sequence]])


@loss_functions.register("sppo")
def sppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    *,
    eta: float = 1e3,
) -> TokenLoss:
    """(Σ_t(log π − log π_old) − η·A)², A = P̂ − 1/2 of the response: its estimated chance to beat the others, centred.

    SPPO, arXiv 2405.00675, with the paper's η of 1000: the target for a response that always wins is e^500 times
    its probability; the learning rate limits how far it gets. Smaller η give smaller targets.

    Two responses of log-ratio 0.5 and −0.5, always won and always lost, with η = 4: (0.5 − 2)² and (−0.5 + 2)²:

    >>> sequence, lengths, advantages = torch.tensor([0, 0, 1]), torch.tensor([2, 1]), torch.tensor([0.5, 0.5, -0.5])
    >>> sppo(torch.tensor([0.2, 0.3, -0.5]), torch.zeros(3), advantages, sequence, lengths, eta=4.0).loss
    tensor([2.2500, 2.2500, 2.2500])
    """
    log_ratios = sequence_sums(log_probs - old_log_probs, sequence, lengths).to(log_probs.dtype)
    return unclipped((log_ratios[sequence] - eta * advantages).square())
