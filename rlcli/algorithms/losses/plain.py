"""Losses that use log π itself and clip nothing."""

from __future__ import annotations

from rlcli.algorithms.lazy import Tensor
from rlcli.algorithms.losses.base import TokenLoss, loss_functions, unclipped


@loss_functions.register("gpg")
def gpg(log_probs: Tensor, advantages: Tensor) -> TokenLoss:
    """−A·log π: the policy gradient, no ratio. GPG, arXiv 2504.02546. It assumes that the samples are the policy's own.

    >>> from torch import tensor
    >>> gpg(tensor([-2.0, -1.0]), tensor([1.0, -0.5])).loss
    tensor([ 2.0000, -0.5000])
    """
    return unclipped(-advantages * log_probs)


@loss_functions.register("dro")
def dro(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, beta: float) -> TokenLoss:
    """−(A·log π − β/2·(log π − log π_old)²): the policy gradient with a quadratic pull to the old policy.

    DRO, arXiv 2405.19107, for tokens where the paper has whole responses; A replaces its reward minus value. β has no
    default: it is in the units of A.

    Log-ratio 0.5 and log π = −1: 1 + 2/2·0.25 with A = 1, −1 + 0.25 with A = −1:

    >>> from torch import tensor
    >>> dro(tensor([-1.0, -1.0]), tensor([-1.5, -1.5]), tensor([1.0, -1.0]), beta=2.0).loss
    tensor([ 1.2500, -0.7500])
    """
    return unclipped(-(advantages * log_probs - beta / 2 * (log_probs - old_log_probs).square()))
