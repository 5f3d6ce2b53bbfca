"""Shaping: rewards that are added to the verifier's score of a response, float64 [S]."""

from __future__ import annotations

import torch
from torch import Tensor


def overlong(lengths: Tensor, *, max_length: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """penalty · clamp((max_length − buffer − length) / buffer, −1, 0). DAPO, arXiv 2503.14476 eq. 13.

    The penalty for responses (lengths: int64 [S], in tokens) that approach the limit. DAPO: max_length = 20480, buffer
    = 4096, penalty = 1. A buffer of 0 penalises nothing.

    >>> overlong(torch.tensor([60, 70, 100]), max_length=100, buffer=40)
    tensor([ 0.0000, -0.2500, -1.0000], dtype=torch.float64)
    """
    room = (max_length - buffer - lengths.double()).clamp(-buffer, 0)
    return penalty * room / max(buffer, 1)


def length_reward(correct: Tensor, lengths: Tensor, groups: Tensor, *, weight: float) -> Tensor:
    """weight · λ where `correct`, weight · min(0, λ) elsewhere. Kimi k1.5, arXiv 2501.12599 §2.3.3.

    λ = 0.5 − (length − min_g) / (max_g − min_g) over the group's lengths; 0 if all of a group's lengths are equal. So
    among right responses short ones gain and long ones lose; a wrong one gains nothing by being short. correct: bool
    [S]. lengths: int64 [S], in tokens. groups: int64 [S], labels in any order.

    >>> correct, lengths = torch.tensor([True, True, False, False]), torch.tensor([10, 20, 10, 15])
    >>> length_reward(correct, lengths, torch.zeros(4, dtype=torch.int64), weight=1.0)
    tensor([ 0.5000, -0.5000,  0.0000,  0.0000], dtype=torch.float64)
    """
    labels, index = torch.unique(groups, return_inverse=True)
    sizes = lengths.double()
    empty = torch.empty(len(labels), dtype=torch.float64, device=sizes.device)
    shortest = empty.scatter_reduce(0, index, sizes, "amin", include_self=False)[index]
    longest = empty.scatter_reduce(0, index, sizes, "amax", include_self=False)[index]
    spread = longest - shortest
    rise = torch.where(spread > 0, 0.5 - (sizes - shortest) / spread.clamp(min=1), 0.0)
    return weight * torch.where(correct, rise, rise.clamp(max=0.0))


def soft_format(format_scores: Tensor, *, weight: float) -> Tensor:
    """weight · the verifier's judgement of the format (float [S], usually 0 or 1), for right and wrong answers alike.

    >>> soft_format(torch.tensor([1.0, 0.0]), weight=0.1)
    tensor([0.1000, 0.0000], dtype=torch.float64)
    """
    return weight * format_scores.double()
