"""Losses that use log π itself and clip nothing."""

from __future__ import annotations

from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.losses.base import TokenLoss, loss_functions, unclipped


@loss_functions.register("gpg", needs=("log_probs", "advantages"))
def gpg(inputs: LossInputs) -> TokenLoss:
    """−A·log π: the policy gradient, no ratio. GPG, arXiv 2504.02546. It assumes that the samples are the policy's own.

    >>> from torch import tensor
    >>> gpg(LossInputs(log_probs=tensor([-2.0, -1.0]), advantages=tensor([1.0, -0.5]))).loss
    tensor([ 2.0000, -0.5000])
    """
    return unclipped(-inputs.advantages * inputs.log_probs)


@loss_functions.register("dro", needs=("log_probs", "old_log_probs", "advantages"))
def dro(inputs: LossInputs, *, beta: float) -> TokenLoss:
    """−(A·log π − β/2·(log π − log π_old)²): the policy gradient with a quadratic pull to the old policy.

    DRO, arXiv 2405.19107, for tokens where the paper has whole responses; A replaces its reward minus value. β has no
    default: it is in the units of A.

    Log-ratio 0.5 and log π = −1: 1 + 2/2·0.25 with A = 1, −1 + 0.25 with A = −1:

    >>> from torch import tensor
    >>> log_probs, old_log_probs = tensor([-1.0, -1.0]), tensor([-1.5, -1.5])
    >>> inputs = LossInputs(log_probs=log_probs, old_log_probs=old_log_probs, advantages=tensor([1.0, -1.0]))
    >>> dro(inputs, beta=2.0).loss
    tensor([ 1.2500, -0.7500])
    """
    log_probs, drift = inputs.log_probs, inputs.log_probs - inputs.old_log_probs
    return unclipped(-(inputs.advantages * log_probs - beta / 2 * drift.square()))
