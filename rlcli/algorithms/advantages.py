"""How rewards become advantages: each response measured against the others of its group.

Every function takes `rewards` (float [N], one a response) and `groups` (int64 [N], labels in any order: responses of
equal label answer the same prompt) and returns the advantages (float [N], dtype of the rewards; computed in float64).
R is a reward, g its group, n = |g|. A group whose rewards are all equal, a group of one included, has advantages of
exactly 0: nothing in it says which response was better, and an exact 0 lets the caller skip its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlcli.algorithms.named import Named

AdvantageFunction = Callable[[Tensor, Tensor], Tensor]

_advantage: Named[AdvantageFunction] = Named("advantage")
get = _advantage.get
names = _advantage.names
register = _advantage.register


@_advantage.register("grpo")
def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = (R − mean_g) / (std_g + 1e-6), std unbiased (÷ n − 1). GRPO, arXiv 2402.03300.

    Of the rewards 1, 0, 0, 0 the mean is 1/4 and the std √(1/4) = 1/2, so the advantages are 3/4 ÷ 1/2 and −1/4 ÷ 1/2:

    >>> grpo(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 7, 7]))
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000])
    """
    centred, index, counts = _centre(rewards, groups)
    variance = _sum_by_group(centred.square(), index, counts) / (counts - 1).clamp(min=1)
    return (centred / (variance.sqrt() + 1e-6)[index]).to(rewards.dtype)


@_advantage.register("dr_grpo")
def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = R − mean_g: no division, so that easy and hard prompts weigh alike. Dr. GRPO, arXiv 2503.20783.

    It goes with the aggregation `seq-mean-token-sum-norm`.

    >>> dr_grpo(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 7, 7]))
    tensor([ 0.7500, -0.2500, -0.2500, -0.2500])
    """
    centred, _, _ = _centre(rewards, groups)
    return centred.to(rewards.dtype)


@_advantage.register("rloo")
def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = n / (n − 1) · (R − mean_g) = R − the mean of the others. REINFORCE leave-one-out, arXiv 2402.14740.

    Beside the reward 1 the others have mean 0; beside a 0 they have mean 1/3:

    >>> rloo(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 7, 7]))
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    centred, index, counts = _centre(rewards, groups)
    return (centred * (counts / (counts - 1).clamp(min=1))[index]).to(rewards.dtype)


def _centre(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """R − mean_g (float64 [N]), the index of each response's group (int64 [N]), and n of each group (float64 [G])."""
    _, index, integers = torch.unique(groups, return_inverse=True, return_counts=True)
    counts = integers.double()  # two int64 tensors would divide in float32
    # Measured from the group's lowest reward, equal rewards are exactly 0 whatever their value; R − mean_g of, say, six
    # rewards of 0.1 is not.
    lowest = torch.empty(len(counts), dtype=torch.float64, device=rewards.device)
    lowest.scatter_reduce_(0, index, rewards.double(), "amin", include_self=False)
    raised = rewards.double() - lowest[index]
    return raised - (_sum_by_group(raised, index, counts) / counts)[index], index, counts


def _sum_by_group(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    return torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add_(0, index, values)
