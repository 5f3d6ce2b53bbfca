"""Losses of whole sequences.

Each token of a sequence has the sequence's loss, so that the aggregation seq-mean-token-mean gives the mean over
sequences of the papers. An empty response has no token and adds nothing.
"""

from __future__ import annotations

from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.lazy import torch
from rlcli.algorithms.losses.base import TokenLoss, loss_functions, ratio, sequence_sums, unclipped
from rlcli.algorithms.losses.clipped import USED, clipped_surrogate


@loss_functions.register("gspo", needs=(*USED, "sequence", "lengths"))
def gspo(
    inputs: LossInputs,
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
    >>> inputs = LossInputs(
    ...     log_probs=torch.tensor([0.6, -0.2, 0.0]), old_log_probs=torch.zeros(3), advantages=torch.ones(3),
    ...     sequence=sequence, lengths=lengths,
    ... )
    >>> term = gspo(inputs)
    >>> term.loss, term.clipped_high.tolist()
    (tensor([-1.0004, -1.0004, -1.0000]), [True, True, False])
    """
    log_probs, sequence, lengths = inputs.log_probs, inputs.sequence, inputs.lengths
    means = sequence_sums((log_probs - inputs.old_log_probs).detach(), sequence, lengths) / lengths.clamp(min=1)
    # The difference is exactly 0: the value is s to the last digit, as bounds of 3e-4 need; the gradient is s·∇log π.
    rho = ratio(log_probs - log_probs.detach(), -means.to(log_probs.dtype)[sequence])
    return clipped_surrogate(rho, inputs.advantages, clip_low, clip_high)


@loss_functions.register("gmpo", needs=(*USED, "sequence", "lengths", "weights"))
def gmpo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLoss:
    """−A·exp(mean_t d_t), d_t = min(log ρ_t, clip_high) where A > 0, max(log ρ_t, −clip_low) where A < 0.

    GMPO, arXiv 2507.20673: PPO with the geometric mean of the token ratios instead of the arithmetic one. The bounds
    are those of log ρ and apply to each token: `clipped_low` is A < 0 with log ρ < −clip_low, `clipped_high` is A > 0
    with log ρ > clip_high. The weight of a response is the geometric mean of those of its tokens, like its ratio (as in
    verl; a weight counts as at least 1e-10).

    Log-ratios 1 and 0 with A = 1 count as 0.4 and 0: −e^0.2; −1 and 0 with A = −1 as −0.4 and 0: e^−0.2:

    >>> sequence, lengths = torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2])
    >>> advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    >>> inputs = LossInputs(
    ...     log_probs=torch.tensor([1.0, 0.0, -1.0, 0.0]), old_log_probs=torch.zeros(4), advantages=advantages,
    ...     sequence=sequence, lengths=lengths, weights=torch.ones(4),
    ... )
    >>> gmpo(inputs).loss
    tensor([-1.2214, -1.2214,  0.8187,  0.8187])

    Weights of 2 and 0.5 combine to 1, and of 2 and 2 to 2:

    >>> gmpo(inputs.replace(weights=torch.tensor([2.0, 0.5, 2.0, 2.0]))).loss
    tensor([-1.2214, -1.2214,  1.6375,  1.6375])
    """
    log_probs, advantages, sequence, lengths = inputs.log_probs, inputs.advantages, inputs.sequence, inputs.lengths
    log_ratio = log_probs - inputs.old_log_probs
    clipped_low = (advantages < 0) & (log_ratio < -clip_low)
    clipped_high = (advantages > 0) & (log_ratio > clip_high)
    held = torch.where(clipped_low, -clip_low, torch.where(clipped_high, clip_high, log_ratio))
    means = (sequence_sums(held, sequence, lengths) / lengths.clamp(min=1)).to(log_probs.dtype)
    loss = -advantages * ratio(means, torch.zeros_like(means))[sequence]
    logs = sequence_sums(inputs.weights.double().clamp(min=1e-10).log(), sequence, lengths)
    weights = (logs / lengths.clamp(min=1)).exp().to(loss.dtype)[sequence]
    return TokenLoss(loss * weights, clipped_low, clipped_high)


@loss_functions.register(
    "dpo", needs=("log_probs", "reference_log_probs", "advantages", "sequence", "lengths", "pairs")
)
def dpo(inputs: LossInputs, *, beta: float = 0.1) -> TokenLoss:
    """−log σ(β(h_w − h_l)), h = Σ_t(log π − log π_ref), on each token of the two responses of a pair.

    DPO, arXiv 2305.18290. pairs: int64 [S]; two sequences of equal label are a pair, and both must be here. The sign of
    A (only the sign counts) distinguishes them: > 0 the preferred one, w; < 0 the other, l. The mean over sequences is
    the mean over pairs: if one response of a pair is empty (its h is 0), the other one carries the loss of both.

    h is 1 and −1, so −log σ(0.1·2) = 0.5981:

    >>> sequence, lengths, pairs = torch.tensor([0, 0, 1]), torch.tensor([2, 1]), torch.tensor([7, 7])
    >>> log_probs, reference = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.5, -1.5, -1.0])
    >>> inputs = LossInputs(
    ...     log_probs=log_probs, reference_log_probs=reference, advantages=torch.tensor([1.0, 1.0, -1.0]),
    ...     sequence=sequence, lengths=lengths, pairs=pairs,
    ... )
    >>> dpo(inputs).loss
    tensor([0.5981, 0.5981, 0.5981])
    """
    log_probs, sequence, lengths = inputs.log_probs, inputs.sequence, inputs.lengths
    labels, pair, members = torch.unique(inputs.pairs, return_inverse=True, return_counts=True)
    assert bool((members == 2).all()), f"pairs of other than two sequences: {labels[members != 2].tolist()}"
    signed = inputs.advantages.sign() * (log_probs - inputs.reference_log_probs)
    margins = torch.zeros(labels.shape, dtype=torch.float64, device=log_probs.device)
    margins = margins.index_add(0, pair, sequence_sums(signed, sequence, lengths))
    speaking = torch.zeros_like(margins).index_add(0, pair, (lengths > 0).double()).clamp(min=1.0)
    losses = -torch.nn.functional.logsigmoid(beta * margins) * 2.0 / speaking
    return unclipped(losses.to(log_probs.dtype)[pair[sequence]])


@loss_functions.register("sppo", needs=(*USED, "sequence", "lengths"))
def sppo(inputs: LossInputs, *, eta: float = 1e3) -> TokenLoss:
    """(Σ_t(log π − log π_old) − η·A)², A = P̂ − 1/2 of the response: its estimated chance to beat the others, centred.

    SPPO, arXiv 2405.00675, with the paper's η of 1000: the target for a response that always wins is e^500 times
    its probability; the learning rate limits how far it gets. Smaller η give smaller targets.

    Two responses of log-ratio 0.5 and −0.5, always won and always lost, with η = 4: (0.5 − 2)² and (−0.5 + 2)²:

    >>> sequence, lengths, advantages = torch.tensor([0, 0, 1]), torch.tensor([2, 1]), torch.tensor([0.5, 0.5, -0.5])
    >>> inputs = LossInputs(
    ...     log_probs=torch.tensor([0.2, 0.3, -0.5]), old_log_probs=torch.zeros(3), advantages=advantages,
    ...     sequence=sequence, lengths=lengths,
    ... )
    >>> sppo(inputs, eta=4.0).loss
    tensor([2.2500, 2.2500, 2.2500])
    """
    log_probs, sequence = inputs.log_probs, inputs.sequence
    log_ratios = sequence_sums(log_probs - inputs.old_log_probs, sequence, inputs.lengths).to(log_probs.dtype)
    return unclipped((log_ratios[sequence] - eta * inputs.advantages).square())
