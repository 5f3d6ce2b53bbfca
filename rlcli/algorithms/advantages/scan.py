"""Sums from each token to the end of its response, without a loop over tokens."""

from __future__ import annotations

from rlcli.algorithms.lazy import Tensor, torch


def discounted_sums(values: Tensor, sequence: Tensor, decay: float | Tensor) -> Tensor:
    """G_t = x_t + d · G_{t+1} within each sequence, 0 after its last token: float64 [T].

    values: float [T]. sequence: int64 [T], non-decreasing. decay: d, one for all or float [T], equal within a sequence.

    After k rounds G_t covers the 2^k tokens from t on, so ⌈log₂ of the longest⌉ rounds cover all: G_t ← G_t + d^(2^k) ·
    G_{t + 2^k}, if token t + 2^k is still in the same sequence.

    >>> discounted_sums(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 0, 0, 1]), 0.5)
    tensor([3., 4., 4., 8.], dtype=torch.float64)
    """
    sums = values.double()
    power = torch.as_tensor(decay, dtype=torch.float64, device=values.device).expand_as(sums)
    step = 1
    while step < len(sums) and bool((inside := sequence[step:] == sequence[:-step]).any()):
        ahead = torch.where(inside, power[:-step] * sums[step:], 0.0)
        sums = torch.cat([sums[:-step] + ahead, sums[-step:]])
        power = power.square()
        step *= 2
    return sums
