"""Advantages of whole responses: each is compared with the others that answer the same prompt.

A function takes `AdvantageInputs` of the whole step, in any order of its responses; g is a group, n = |g|.
Every function returns the advantages: float [S], dtype of the rewards, computed in float64.

A group whose rewards are all equal, including a group of one, has advantages of exactly 0 unless the function states
otherwise: no response in it is better than another, and an exact 0 lets the caller skip its forward pass.
"""

from __future__ import annotations

from rlcli.algorithms.advantages.base import register
from rlcli.algorithms.advantages.moments import Grouped, whiten
from rlcli.algorithms.inputs import AdvantageInputs
from rlcli.algorithms.lazy import Tensor, torch
from rlcli.errors import ConfigError

_EPSILON = 1e-6
"""Added to denominators, so that a small spread or mean does not make advantages arbitrarily large."""


@register("grpo", needs=("rewards", "groups"), needs_group=True)
def grpo(inputs: AdvantageInputs, *, scale: str = "group") -> Tensor:
    """A = (R − mean_g) / (std_g + 1e-6), std unbiased (÷ n − 1). GRPO, arXiv 2402.03300.

    scale: "group" as above; "batch" divides by the std of all rewards of the step, + 1e-6 (as TRL's `scale_rewards`
    does), so that the groups keep their relative weights; "none" does not divide, as in `dr_grpo`. Raises
    `ConfigError` for any other value.

    For the rewards 1, 0, 0, 0 the mean is 1/4 and the std √(1/4) = 1/2, so the advantages are 3/4 ÷ 1/2 and −1/4 ÷ 1/2:

    >>> rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 7, 7])
    >>> grpo(AdvantageInputs(rewards=rewards, groups=groups))
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000])

    For 2, 0 and 1, 1 in two groups the std over the batch is √(2/3) = 0.8165:

    >>> rewards, groups = torch.tensor([2.0, 0.0, 1.0, 1.0]), torch.tensor([7, 7, 8, 8])
    >>> grpo(AdvantageInputs(rewards=rewards, groups=groups), scale="batch")
    tensor([ 1.2247, -1.2247,  0.0000,  0.0000])
    """
    grouped = Grouped.of(inputs.rewards, inputs.groups)
    if scale == "group":
        divisor = grouped.std + _EPSILON
    elif scale == "batch":
        divisor = Grouped.of(inputs.rewards, torch.zeros_like(inputs.groups)).std + _EPSILON
    elif scale == "none":
        divisor = torch.ones_like(grouped.raised)
    else:
        raise ConfigError(f"advantage grpo: there is no scale '{scale}'", "choose one of: batch, group, none")
    return (grouped.centred / divisor).to(inputs.rewards.dtype)


@register("dr_grpo", needs=("rewards", "groups"), needs_group=True)
def dr_grpo(inputs: AdvantageInputs) -> Tensor:
    """A = R − mean_g: no division, so that easy and hard prompts have equal weight. Dr. GRPO, arXiv 2503.20783.

    Use it with the aggregation `seq-mean-token-sum-norm`.

    >>> rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 7, 7])
    >>> dr_grpo(AdvantageInputs(rewards=rewards, groups=groups))
    tensor([ 0.7500, -0.2500, -0.2500, -0.2500])
    """
    return Grouped.of(inputs.rewards, inputs.groups).centred.to(inputs.rewards.dtype)


@register("rloo", needs=("rewards", "groups"), needs_group=True)
def rloo(inputs: AdvantageInputs) -> Tensor:
    """A = n / (n − 1) · (R − mean_g) = R − the mean of the others. REINFORCE leave-one-out, arXiv 2402.14740.

    For the reward 1 the mean of the others is 0; for a 0 it is 1/3:

    >>> rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 7, 7])
    >>> rloo(AdvantageInputs(rewards=rewards, groups=groups))
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    grouped = Grouped.of(inputs.rewards, inputs.groups)
    return (grouped.centred * grouped.sizes / (grouped.sizes - 1).clamp(min=1)).to(inputs.rewards.dtype)


@register("grpo_passk", needs=("rewards", "groups"), needs_group=True)
def grpo_passk(inputs: AdvantageInputs) -> Tensor:
    """A = (r₁ − r₂) / (std_g + 1e-6) for the best of the group, 0 for all others. Pass@k, arXiv 2503.19595.

    r₁ and r₂ are the highest and the second highest reward, so two that share the highest get 0. std unbiased.

    For 3, 1, 2 the std is 1:

    >>> rewards, groups = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([7, 7, 7])
    >>> grpo_passk(AdvantageInputs(rewards=rewards, groups=groups))
    tensor([1.0000, 0.0000, 0.0000])
    """
    grouped = Grouped.of(inputs.rewards, inputs.groups)
    best = grouped.raised == grouped.highest(grouped.raised)
    alone = best & (grouped.sum(best.double()) == 1)
    second = grouped.highest(grouped.raised.masked_fill(best, 0.0))  # the lowest of a group is raised to 0
    return torch.where(alone, (grouped.raised - second) / (grouped.std + _EPSILON), 0.0).to(inputs.rewards.dtype)


@register("gpg", needs=("rewards", "groups"), needs_group=True)
def gpg(inputs: AdvantageInputs) -> Tensor:
    """A = α (R − mean_g), α = N / responses with a gradient. Group policy gradient, arXiv 2504.02546.

    Responses in groups of equal rewards have no gradient; α compensates for them, since their zeros dilute the mean of
    the others.

    Half of these four are in a group of equal rewards, so α = 2:

    >>> rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([7, 7, 8, 8])
    >>> gpg(AdvantageInputs(rewards=rewards, groups=groups))
    tensor([ 1., -1.,  0.,  0.])
    """
    grouped = Grouped.of(inputs.rewards, inputs.groups)
    varied = grouped.highest(grouped.raised) > 0
    return (grouped.centred * (len(inputs.rewards) / varied.sum().clamp(min=1).double())).to(inputs.rewards.dtype)


@register("maxrl", needs=("rewards", "groups"), needs_group=True)
def maxrl(inputs: AdvantageInputs) -> Tensor:
    """A = (R − mean_g) / (mean_g + 1e-6), 0 if mean_g ≤ 0. Maximum-likelihood RL, arXiv 2602.02710.

    The paper's rewards are 0 or 1: mean_g estimates the probability of success, a group without success has no
    gradient, and A lies in [−1, n − 1]. Rewards below 0 leave that range; a group whose mean is then 0 or below
    counts as one without success.

    >>> rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 7, 7])
    >>> maxrl(AdvantageInputs(rewards=rewards, groups=groups))  # 3/4 ÷ 1/4 and −1/4 ÷ 1/4
    tensor([ 3.0000, -1.0000, -1.0000, -1.0000])
    """
    grouped = Grouped.of(inputs.rewards, inputs.groups)
    mean = grouped.sum(inputs.rewards.double()) / grouped.sizes
    return (grouped.centred * (mean > 0) / (mean.clamp(min=0) + _EPSILON)).to(inputs.rewards.dtype)


@register("opo", needs=("rewards", "groups", "lengths"), needs_group=True)
def opo(inputs: AdvantageInputs) -> Tensor:
    """A = R − Σ L·R / Σ L over g, L the length in tokens: the baseline of least variance. OPO, arXiv 2505.23585.

    In a group with only empty responses, where no advantage is used, it is finite.

    The baseline for the rewards 1 and 0 with 3 tokens and 1 is 3/4:

    >>> rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([7, 7])
    >>> opo(AdvantageInputs(rewards=rewards, groups=groups, lengths=torch.tensor([3, 1])))
    tensor([ 0.2500, -0.7500])
    """
    grouped = Grouped.of(inputs.rewards, inputs.groups)
    weights = inputs.lengths.double()
    baseline = grouped.sum(weights * grouped.raised) / grouped.sum(weights).clamp(min=1)
    return (grouped.raised - baseline).to(inputs.rewards.dtype)


@register("remax", needs=("rewards", "baselines"))
def remax(inputs: AdvantageInputs) -> Tensor:
    """A = R − the reward of the greedy response to the same prompt. ReMax, arXiv 2310.10505.

    Exactly 0 if the two are equal, whatever the other rewards of the group.

    >>> remax(AdvantageInputs(rewards=torch.tensor([1.0, 0.0]), baselines=torch.tensor([0.0, 0.0])))
    tensor([1., 0.])
    """
    return (inputs.rewards.double() - inputs.baselines.double()).to(inputs.rewards.dtype)


@register("win_rate", needs=("rewards", "groups"), needs_group=True)
def win_rate(inputs: AdvantageInputs) -> Tensor:
    """A = the share of the others of the group that the response beats, ties half, − 1/2. SPPO, arXiv 2405.00675.

    For 3, 2, 2 the first beats both others, the second ties with one of its two:

    >>> rewards, groups = torch.tensor([3.0, 2.0, 2.0]), torch.tensor([7, 7, 7])
    >>> win_rate(AdvantageInputs(rewards=rewards, groups=groups))
    tensor([ 0.5000, -0.2500, -0.2500])
    """
    grouped = Grouped.of(inputs.rewards, inputs.groups)
    # Sorted by group, then by reward, the beaten ones are those before the first of equal reward. Cost: N log N.
    values, rank = torch.unique(inputs.rewards, return_inverse=True)
    _, cell, ties = torch.unique(grouped.index * len(values) + rank, return_inverse=True, return_counts=True)
    lower = (ties.cumsum(0) - ties)[cell].double()
    beaten = lower + grouped.highest(-lower)  # minus the lowest: the number before the whole group
    share = (beaten + (ties[cell].double() - 1) / 2) / (grouped.sizes - 1).clamp(min=1)
    return torch.where(grouped.sizes > 1, share - 0.5, 0.0).to(inputs.rewards.dtype)


@register("one", needs=("rewards",), ignores_rewards=True)
def one(inputs: AdvantageInputs) -> Tensor:
    """A = 1 for every response, equal rewards or not: likelihood only, for supervised losses.

    >>> one(AdvantageInputs(rewards=torch.tensor([1.0, 0.0])))
    tensor([1., 1.])
    """
    return torch.ones_like(inputs.rewards)


@register("reinforce_pp_baseline", needs=("rewards", "groups", "lengths"), needs_group=True)
def reinforce_pp_baseline(inputs: AdvantageInputs) -> Tensor:
    """A = whiten(R − mean_g), over the tokens of the step. REINFORCE++ with baseline, arXiv 2501.03262.

    Each response is weighted by its number of tokens, with var + 1e-8. So the subtracted mean is 0 only if lengths are
    equal, and a group of equal rewards has an advantage of 0 only then, or if all groups have equal rewards.

    R − mean_g is 1/2 on one token and −1/2 on three; their mean is −1/4 and their variance (9 + 3) / 16 / 3 = 1/4:

    >>> rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([7, 7])
    >>> reinforce_pp_baseline(AdvantageInputs(rewards=rewards, groups=groups, lengths=torch.tensor([1, 3])))
    tensor([ 1.5000, -0.5000])
    """
    return whiten(Grouped.of(inputs.rewards, inputs.groups).centred, inputs.lengths).to(inputs.rewards.dtype)


@register("gdpo", needs=("parts", "groups", "part_weights"), needs_group=True)
def gdpo(inputs: AdvantageInputs) -> Tensor:
    """A = whiten(Σ_k w_k · GRPO(part k)), over the responses of the step. GDPO, arXiv 2601.05242.

    Each part is normalised separately, so it keeps its influence however small its scale. A part weighs 1 unless there
    are `part_weights`. Raises `ConfigError` for another number of weights. var + 1e-8, unbiased. The sum has mean 0 in
    every group, so whitening only divides, and if all parts of a group are equal its advantages are exactly 0.

    GRPO gives ±1/√2 for the first part in both groups, and for the second in the first group. The sums √2, −√2, 1/√2,
    −1/√2 have variance 5/3, so the advantages are ±√(6/5) and ±√(3/10):

    >>> parts = torch.tensor([[1.0, 10.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    >>> gdpo(AdvantageInputs(parts=parts, groups=torch.tensor([7, 7, 8, 8])))
    tensor([ 1.0954, -1.0954,  0.5477, -0.5477])
    """
    parts = inputs.parts
    part_weights = inputs.part_weights if inputs.has("part_weights") else [1.0] * parts.shape[1]
    if len(part_weights) != parts.shape[1]:
        raise ConfigError(
            f"advantage gdpo: {len(part_weights)} weights for the {parts.shape[1]} parts of the reward",
            "give one weight a part, or none",
        )
    total = torch.zeros_like(parts[:, 0], dtype=torch.float64)
    for part, weight in zip(parts.T, part_weights, strict=True):
        grouped = Grouped.of(part, inputs.groups)
        total = total + weight * grouped.centred / (grouped.std + _EPSILON)
    variance = total.square().sum() / max(len(total) - 1, 1)
    return (total / (variance + 1e-8).sqrt()).to(parts.dtype)
