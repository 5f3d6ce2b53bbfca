"""Weights that make up for the engine, which does not generate with quite the probabilities that the trainer computes.

Every function takes `log_probs` (float [T], log π of the trainer for the policy that generated), `rollout_log_probs`
(float [T], log μ as the engine reported it), `sequence` (int64 [T]) and `lengths` (int64 [S]), those that it declares,
and returns the weight of each token's policy loss (float [T], dtype of `log_probs`, without gradient). r = π / μ =
exp(clamp(log π − log μ, ±20)), computed in float64. Of a response, Π is the product of its r, with log Π clamped
likewise, and G is their geometric mean.

The options are one table for all: `correction_cap`, `correction_low`, `correction_high`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlcli.algorithms.lazy import Tensor, torch
from rlcli.algorithms.losses.base import sequence_sums
from rlcli.algorithms.named import Named

CorrectionFunction = Callable[..., Tensor]

_correction: Named[CorrectionFunction] = Named("rollout correction")
get = _correction.get
names = _correction.names
register = _correction.register

LIMIT = 20.0
"""Largest difference of two log-probs that counts: an engine may report −inf."""


@_correction.register("none")
def none(log_probs: Tensor) -> Tensor:
    """1: trust the engine.

    >>> none(torch.tensor([-0.5, -2.0]))
    tensor([1., 1.])
    """
    return torch.ones_like(log_probs)


@_correction.register("token_tis")
def token_tis(log_probs: Tensor, rollout_log_probs: Tensor, *, correction_cap: float = 2.0) -> Tensor:
    """min(r, cap), cap = 2: truncated importance sampling of each token.

    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).

    >>> token_tis(torch.tensor([0.5, 0.3, 0.9]).log(), torch.tensor([0.4, 0.6, 0.1]).log())  # r = 1.25, 0.5, 9
    tensor([1.2500, 0.5000, 2.0000])
    """
    return _log_ratio(log_probs, rollout_log_probs).exp().clamp(max=correction_cap).to(log_probs.dtype)


@_correction.register("sequence_tis")
def sequence_tis(
    log_probs: Tensor, rollout_log_probs: Tensor, sequence: Tensor, lengths: Tensor, *, correction_cap: float = 2.0
) -> Tensor:
    """min(Π, cap), cap = 2, on every token of the response: unbiased but for the cap, of more variance than token_tis.

    Liu, Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (2025).

    Two responses, of r = 1.25, 0.5 and of r = 9:

    >>> log_probs, rollout_log_probs = torch.tensor([0.5, 0.3, 0.9]).log(), torch.tensor([0.4, 0.6, 0.1]).log()
    >>> sequence_tis(log_probs, rollout_log_probs, torch.tensor([0, 0, 1]), torch.tensor([2, 1]))
    tensor([0.6250, 0.6250, 2.0000])
    """
    product = _product(_log_ratio(log_probs, rollout_log_probs), sequence, lengths)
    return product.clamp(max=correction_cap).to(log_probs.dtype)


@_correction.register("icepop")
def icepop(
    log_probs: Tensor, rollout_log_probs: Tensor, *, correction_low: float = 0.5, correction_high: float = 5.0
) -> Tensor:
    """r where low ≤ r ≤ high, else 0; low = 0.5, high = 5. IcePop of Ring-1T, arXiv 2510.18855.

    >>> icepop(torch.tensor([0.8, 0.2, 0.9]).log(), torch.tensor([0.4, 0.6, 0.1]).log())  # r = 2, 1/3, 9
    tensor([2., 0., 0.])
    """
    ratio = _log_ratio(log_probs, rollout_log_probs).exp()
    return (ratio * _within(ratio, correction_low, correction_high)).to(log_probs.dtype)


@_correction.register("sequence_mask")
def sequence_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    *,
    correction_low: float = 0.5,
    correction_high: float = 2.0,
) -> Tensor:
    """1 where low ≤ Π ≤ high, else 0 on the whole response; low = 0.5, high = 2 (verl's for this rejection).

    Rejection by response, of Liu, Li et al., "When Speed Kills Stability" (2025). Π strays with the length, so this
    rejects most long responses: the geometric mean does not.

    Π = 0.625 and Π = 9:

    >>> log_probs, rollout_log_probs = torch.tensor([0.5, 0.3, 0.9]).log(), torch.tensor([0.4, 0.6, 0.1]).log()
    >>> sequence_mask(log_probs, rollout_log_probs, torch.tensor([0, 0, 1]), torch.tensor([2, 1]))
    tensor([1., 1., 0.])
    """
    product = _product(_log_ratio(log_probs, rollout_log_probs), sequence, lengths)
    return _within(product, correction_low, correction_high).to(log_probs.dtype)


@_correction.register("geometric_mask")
def geometric_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    *,
    correction_low: float = 0.999,
    correction_high: float = 1.001,
) -> Tensor:
    """1 where low ≤ G ≤ high, else 0 on the whole response; low = 0.999, high = 1.001 (verl's for this rejection).

    As `sequence_mask`, whatever the length; the bounds are tight because a mean strays little.

    G = √(1.25 · 0.8) = 1 and G = 1.01:

    >>> log_probs, rollout_log_probs = torch.tensor([0.5, 0.4, 0.505]).log(), torch.tensor([0.4, 0.5, 0.5]).log()
    >>> geometric_mask(log_probs, rollout_log_probs, torch.tensor([0, 0, 1]), torch.tensor([2, 1]))
    tensor([1., 1., 0.])
    """
    # The mean of clamped numbers needs no clamp of its own.
    mean = (sequence_sums(_log_ratio(log_probs, rollout_log_probs), sequence, lengths) / lengths.clamp(min=1))[
        sequence
    ].exp()
    return _within(mean, correction_low, correction_high).to(log_probs.dtype)


def mismatch_sums(
    log_probs: Tensor, rollout_log_probs: Tensor, weights: Tensor, sequence: Tensor, lengths: Tensor
) -> dict[str, Tensor]:
    """What `mismatch_metrics` divides: float64 scalars that add up over micro-batches and ranks.

    weights: float [T], what the correction gave those tokens. A token counts as corrected if its weight is not 1, nor
    its r, nor the Π of its response: the correction cut it or made it 0. (Weights cut at a cap of exactly 1 are not
    told apart from no correction.)
    """
    log_ratio = _log_ratio(log_probs, rollout_log_probs)
    ratio = log_ratio.exp()
    free = torch.stack([torch.ones_like(ratio), ratio, _product(log_ratio, sequence, lengths)])
    # The weights may have been rounded to float32, and a sum on a GPU need not come out twice the same.
    untouched = torch.isclose(weights.double().expand_as(free), free, rtol=1e-6, atol=0.0).any(0)
    sums = {
        "mismatch_tokens": torch.ones_like(ratio),
        "mismatch_kl": -log_ratio,
        "mismatch_k3": torch.expm1(log_ratio) - log_ratio,
        "mismatch_ratio": ratio,
        "mismatch_ratio_squared": ratio.square(),
        "mismatch_outliers": ~_within(ratio, 0.5, 2.0),
        "mismatch_corrected": ~untouched,
    }
    return {name: values.sum(dtype=torch.float64) for name, values in sums.items()}


def mismatch_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """How far engine and trainer are apart, from the totals of `mismatch_sums` over all tokens of a step.

    mismatch/kl         KL(μ ‖ π) a token, the mean of −log r: unbiased, may be negative by chance
    mismatch/k3         KL(μ ‖ π) a token, the mean of r − 1 − log r: never negative, less noise
    mismatch/ess        effective sample size as a share of the tokens, (Σ r)² / (T Σ r²): 1 where all r agree
    mismatch/outliers   share of tokens with r outside [0.5, 2]
    mismatch/corrected  share of tokens whose weight the correction cut or made 0

    Two tokens of r = 1 and r = 3, of which the second was cut at 2; (1 + 3)² / (2 · (1 + 9)) = 0.8:

    >>> log_probs, rollout_log_probs = torch.tensor([0.5, 0.6]).log(), torch.tensor([0.5, 0.2]).log()
    >>> one = torch.tensor([0, 0]), torch.tensor([2])
    >>> sums = mismatch_sums(log_probs, rollout_log_probs, token_tis(log_probs, rollout_log_probs), *one)
    >>> for name, value in mismatch_metrics({name: total.item() for name, total in sums.items()}).items():
    ...     print(f"{name} {value:.4f}")
    mismatch/kl -0.5493
    mismatch/k3 0.4507
    mismatch/ess 0.8000
    mismatch/outliers 0.5000
    mismatch/corrected 0.5000
    """
    tokens, squares = max(sums["mismatch_tokens"], 1.0), sums["mismatch_ratio_squared"]
    return {
        "mismatch/kl": sums["mismatch_kl"] / tokens,
        "mismatch/k3": sums["mismatch_k3"] / tokens,
        "mismatch/ess": sums["mismatch_ratio"] ** 2 / (tokens * squares) if squares else 1.0,
        "mismatch/outliers": sums["mismatch_outliers"] / tokens,
        "mismatch/corrected": sums["mismatch_corrected"] / tokens,
    }


def _log_ratio(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    return (log_probs.detach().double() - rollout_log_probs.detach().double()).clamp(-LIMIT, LIMIT)


def _product(log_ratio: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
    """Π of each token's response, [T]."""
    return sequence_sums(log_ratio, sequence, lengths).clamp(-LIMIT, LIMIT).exp()[sequence]


def _within(ratio: Tensor, low: float, high: float) -> Tensor:
    return (low <= ratio) & (ratio <= high)
