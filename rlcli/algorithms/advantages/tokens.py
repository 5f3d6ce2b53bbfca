"""Advantages of single tokens, which may differ within a response.

A function takes `AdvantageInputs` of the sequences of this rank; a group may span several ranks.
Every function returns `TokenAdvantages`, dtype of the token-level inputs, computed in float64. All of them are whitened
over all tokens of the step: (A − mean) / √(var + 1e-8), var unbiased.
"""

from __future__ import annotations

from rlcli.algorithms.advantages.base import TokenAdvantages, register
from rlcli.algorithms.advantages.moments import whiten
from rlcli.algorithms.inputs import AdvantageInputs
from rlcli.algorithms.lazy import Tensor, torch


@register("reinforce_pp", level="token", needs=("token_rewards", "sequence"))
def reinforce_pp(inputs: AdvantageInputs, *, gamma: float = 1.0) -> TokenAdvantages:
    """A = whiten(G), G_t = r_t + γ G_{t+1}. REINFORCE++, arXiv 2501.03262. No critic.

    For the rewards 0, 1 of one response and 0 of another, G = 1, 1, 0 has mean 2/3 and variance 1/3:

    >>> inputs = AdvantageInputs(token_rewards=torch.tensor([0.0, 1.0, 0.0]), sequence=torch.tensor([0, 0, 1]))
    >>> reinforce_pp(inputs).advantages
    tensor([ 0.5774,  0.5774, -1.1547])
    """
    sums = discounted_sums(inputs.token_rewards, inputs.sequence, gamma)
    return TokenAdvantages(whiten(sums, ranks=inputs.ranks).to(inputs.token_rewards.dtype), None)


@register("opd", level="token", needs=("old_log_probs", "teacher_log_probs"))
def opd(inputs: AdvantageInputs) -> TokenAdvantages:
    """A_t = log ν(y_t) − log π_old(y_t), ν the teacher: minus the one-sample estimate of KL(π ‖ ν) at each token.

    On-Policy Distillation (thinkingmachines.ai/blog/on-policy-distillation), the reverse KL of GKD, arXiv 2306.13649.
    On samples of π the gradient is that of the KL of each next token, since E[∇log π · log π] has no other term; the
    effect of a token on the KL of later ones is left out (a discount of 0). Nothing is whitened: a student that equals
    its teacher has advantages of exactly 0. Rewards are only reported.

    >>> old_log_probs, teacher_log_probs = torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -2.0])
    >>> opd(AdvantageInputs(old_log_probs=old_log_probs, teacher_log_probs=teacher_log_probs)).advantages
    tensor([0.5000, 0.0000])
    """
    return TokenAdvantages(inputs.teacher_log_probs - inputs.old_log_probs, None)


@register("gae", level="token", needs=("token_rewards", "values", "sequence"))
def gae(inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 1.0) -> TokenAdvantages:
    """A = whiten(Â), Â_t = δ_t + γλ Â_{t+1}, δ_t = r_t + γ V_{t+1} − V_t. GAE, arXiv 1506.02438.

    After the last token V and Â are 0. The returns are Â + V, not whitened.

    With V = 1/2 everywhere, Â = 1/2, 1/2 for a response that ends in reward 1 and −1/2 for one that ends in 0:

    >>> rewards, sequence = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0, 0, 1])
    >>> gae(AdvantageInputs(token_rewards=rewards, values=torch.full((3,), 0.5), sequence=sequence))
    TokenAdvantages(advantages=tensor([ 0.5774,  0.5774, -1.1547]), returns=tensor([1., 1., 0.]))
    """
    values = inputs.values
    advantages = discounted_sums(_deltas(inputs, gamma), inputs.sequence, gamma * lam)
    returns = (advantages + values.double()).to(values.dtype)
    return TokenAdvantages(whiten(advantages, ranks=inputs.ranks).to(values.dtype), returns)


@register("vapo", level="token", needs=("token_rewards", "values", "sequence", "lengths"))
def vapo(inputs: AdvantageInputs, *, alpha: float = 0.05) -> TokenAdvantages:
    """GAE with γ = 1 and a λ for each response, 1 − 1 / (αl), l its length, at least 0. VAPO, arXiv 2504.05118.

    So the sum of the λ^t of a long response grows with l. The critic's returns use λ = 1: they are Σ r from the token
    on. The paper does not mention whitening; we whiten as `gae` does, since VAPO is otherwise that PPO. Its other parts
    (clip-higher, token-mean, the likelihood term on correct responses, value pre-training) are not included here.

    With α = 1 and two tokens λ = 1/2. V = 0.2, 0.6 makes δ = 0.4, 0.4 and Â = 0.6, 0.4, whose std is 0.1414:

    >>> inputs = AdvantageInputs(
    ...     token_rewards=torch.tensor([0.0, 1.0]), values=torch.tensor([0.2, 0.6]), sequence=torch.tensor([0, 0]),
    ...     lengths=torch.tensor([2]),
    ... )
    >>> vapo(inputs, alpha=1.0)
    TokenAdvantages(advantages=tensor([ 0.7071, -0.7071]), returns=tensor([1., 1.]))
    """
    values, sequence = inputs.values, inputs.sequence
    lam = (1 - 1 / (alpha * inputs.lengths.double())).clamp(min=0)[sequence]
    advantages = discounted_sums(_deltas(inputs, 1.0), sequence, lam)
    returns = discounted_sums(inputs.token_rewards, sequence, 1.0).to(values.dtype)
    return TokenAdvantages(whiten(advantages, ranks=inputs.ranks).to(values.dtype), returns)


@register(
    "prime",
    level="token",
    needs=("process_rewards", "rewards", "sequence", "lengths", "groups"),
    needs_group=True,
)
def prime(inputs: AdvantageInputs, *, process_coef: float = 5.0, accuracy_coef: float = 5.0) -> TokenAdvantages:
    """A = whiten(Σ_{s ≥ t} (5 · RLOO(r_s) + 5 · RLOO(R) at the last token)). PRIME, arXiv 2502.01456. No critic.

    RLOO(R) = n/(n−1) · R − Σ_g R / (n−1), and RLOO(r_t) = n/(n−1) · r_t − Σ_g r̄ / (n−1) with r̄ the mean process reward
    of a response: verl's recipe, including its coefficients. Empty responses have no r̄ and count only in the first. A
    response without others to compare with gets 0.

    r = 0.1, 0.3 | 0.4 has r̄ = 0.2 | 0.4, so RLOO(r) = −0.4, 0 | 0.2; R = 1 | 0 has RLOO(R) = 1 | −1. Five times their
    sums −0.4, 1 | −0.8, summed from the end, are 3, 5 | −4, of mean 4/3 and variance 67/3:

    >>> inputs = AdvantageInputs(
    ...     process_rewards=torch.tensor([0.1, 0.3, 0.4]), rewards=torch.tensor([1.0, 0.0]),
    ...     sequence=torch.tensor([0, 0, 1]), lengths=torch.tensor([2, 1]), groups=torch.tensor([0, 0]), group_count=1,
    ... )
    >>> prime(inputs).advantages
    tensor([ 0.3527,  0.7759, -1.1286])
    """
    sequence, lengths, groups, ranks = inputs.sequence, inputs.lengths, inputs.groups, inputs.ranks
    process, accuracy, present = inputs.process_rewards.double(), inputs.rewards.double(), lengths > 0
    means = torch.zeros_like(accuracy).index_add_(0, sequence, process) / lengths.clamp(min=1)
    columns = torch.stack([torch.ones_like(accuracy), accuracy, present.double(), means], dim=1)
    table = columns.new_zeros(inputs.group_count, 4).index_add_(0, groups, columns)
    count, total, count_present, total_means = ranks.add(table)[groups].T
    terms = process_coef * _leave_one_out(process, count_present[sequence], total_means[sequence])
    ends = lengths.cumsum(0)[present] - 1
    terms[ends] += accuracy_coef * _leave_one_out(accuracy, count, total)[present]
    advantages = whiten(discounted_sums(terms, sequence, 1.0), ranks=ranks)
    return TokenAdvantages(advantages.to(inputs.process_rewards.dtype), None)


def discounted_sums(values: Tensor, sequence: Tensor, decay: float | Tensor) -> Tensor:
    """G_t = x_t + d · G_{t+1} within each sequence, 0 after its last token: float64 [R].

    values: float [R]. sequence: int64 [R], non-decreasing. decay: d, one for all or float [R], equal within a sequence.

    After k rounds G_t covers the 2^k tokens from t on, so ⌈log₂ of the longest⌉ rounds cover all: G_t ← G_t + d^(2^k) ·
    G_{t + 2^k}, if token t + 2^k is still in the same sequence.

    >>> discounted_sums(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 0, 0, 1]), 0.5)
    tensor([3., 4., 4., 8.], dtype=torch.float64)
    """
    sums = values.double()
    power = torch.as_tensor(decay, dtype=torch.float64, device=values.device).expand_as(sums)
    step = 1
    while step < len(sums) and bool((inside := sequence[step:] == sequence[:-step]).any()):
        following = torch.where(inside, power[:-step] * sums[step:], 0.0)
        sums = torch.cat([sums[:-step] + following, sums[-step:]])
        power = power.square()
        step *= 2
    return sums


def _deltas(inputs: AdvantageInputs, gamma: float) -> Tensor:
    """δ_t = r_t + γ V_{t+1} − V_t: float64 [R]."""
    exact, sequence = inputs.values.double(), inputs.sequence
    following = torch.zeros_like(exact)
    following[:-1] = torch.where(sequence[1:] == sequence[:-1], exact[1:], 0.0)
    return inputs.token_rewards.double() + gamma * following - exact


def _leave_one_out(values: Tensor, count: Tensor, total: Tensor) -> Tensor:
    """n/(n−1) · x − total / (n−1), which for an x in the total is x − the mean of the others; 0 if n < 2."""
    return torch.where(count > 1, (count * values - total) / (count - 1).clamp(min=1), 0.0)
