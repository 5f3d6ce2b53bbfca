"""Metrics of the mismatch between engine and trainer."""

from __future__ import annotations

from collections.abc import Mapping

from rlcli.algorithms.correction.base import log_ratio_of, product_of, within
from rlcli.algorithms.lazy import Tensor, torch


def mismatch_sums(
    log_probs: Tensor, rollout_log_probs: Tensor, weights: Tensor, sequence: Tensor, lengths: Tensor
) -> dict[str, Tensor]:
    """The sums from which `mismatch_metrics` computes: float64 scalars that add up over micro-batches and ranks.

    weights: float [R], from the correction. A token counts as corrected if its weight is neither 1, nor its r, nor the
    Π of its response: the correction capped it or set it to 0. (Weights capped at exactly 1 cannot be distinguished
    from no correction.)
    """
    log_ratio = log_ratio_of(log_probs, rollout_log_probs)
    ratio = log_ratio.exp()
    free = torch.stack([torch.ones_like(ratio), ratio, product_of(log_ratio, sequence, lengths)])
    # The weights may have been rounded to float32, and a sum on a GPU is not always reproducible.
    untouched = torch.isclose(weights.double().expand_as(free), free, rtol=1e-6, atol=0.0).any(0)
    sums = {
        "mismatch_tokens": torch.ones_like(ratio),
        "mismatch_kl": -log_ratio,
        "mismatch_k3": torch.expm1(log_ratio) - log_ratio,
        "mismatch_ratio": ratio,
        "mismatch_ratio_squared": ratio.square(),
        "mismatch_outliers": ~within(ratio, 0.5, 2.0),
        "mismatch_corrected": ~untouched,
    }
    return {name: values.sum(dtype=torch.float64) for name, values in sums.items()}


def mismatch_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Mismatch between engine and trainer, from the totals of `mismatch_sums` over all tokens of a step.

    mismatch/kl         KL(μ ‖ π) a token, the mean of −log r: unbiased, may be negative by chance
    mismatch/k3         KL(μ ‖ π) a token, the mean of r − 1 − log r: never negative, less noise
    mismatch/ess        effective sample size as a share of the tokens, (Σ r)² / (T Σ r²): 1 if all r agree
    mismatch/outliers   share of tokens with r outside [0.5, 2]
    mismatch/corrected  share of tokens whose weight the correction capped or set to 0

    Two tokens of r = 1 and r = 3, of which the second was capped at 2; (1 + 3)² / (2 · (1 + 9)) = 0.8:

    >>> log_probs, rollout_log_probs = torch.tensor([0.5, 0.6]).log(), torch.tensor([0.5, 0.2]).log()
    >>> one = torch.tensor([0, 0]), torch.tensor([2])
    >>> from rlcli.algorithms.correction.weights import token_tis
    >>> from rlcli.algorithms.inputs import LossInputs
    >>> weights = token_tis(LossInputs(old_log_probs=log_probs, rollout_log_probs=rollout_log_probs))
    >>> sums = mismatch_sums(log_probs, rollout_log_probs, weights, *one)
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
