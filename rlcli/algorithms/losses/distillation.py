"""Losses that compare the policy π with a teacher ν at every position, over the teacher's K likeliest tokens and the
rest.

The K tokens and one event for all others are a distribution of K + 1 probabilities on either side, so the divergence of
the two is at most that of the whole distributions, and equals it if K covers the vocabulary. It has no sampling noise
beyond which positions were visited, and its gradient reaches tokens that were not sampled. π and ν come as
`candidate_log_probs` and `teacher_top_log_probs`: float [R, K], the first with gradient; both at one temperature.
"""

from __future__ import annotations

from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.lazy import Tensor, torch
from rlcli.algorithms.losses.base import TokenLoss, loss_functions, unclipped

USED = ("candidate_log_probs", "teacher_top_log_probs")
"""The columns that each of these losses reads."""
LEAST_REST = 1e-6
"""Smallest probability of the rest: below it, differences of float32 log-probs decide, and there is no gradient."""


@loss_functions.register("opd_forward", needs=USED)
def opd_forward(inputs: LossInputs) -> TokenLoss:
    """KL(ν ‖ π): covers all that the teacher may say. The divergence of supervised distillation, on the student's own
    samples: GKD, arXiv 2306.13649.

    ν = 1/2, 1/2 and π = 1/4, 3/4, of which one token is given: ½ ln 2 + ½ ln ⅔ = ½ ln 4/3 = 0.1438.

    >>> policy, teacher = torch.tensor([[0.25]]).log(), torch.tensor([[0.5]]).log()
    >>> opd_forward(LossInputs(candidate_log_probs=policy, teacher_top_log_probs=teacher)).loss
    tensor([0.1438])
    """
    policy, teacher = _with_rest(inputs.candidate_log_probs), _with_rest(inputs.teacher_top_log_probs)
    return _summed(teacher, policy, inputs.candidate_log_probs)


@loss_functions.register("opd_reverse", needs=USED)
def opd_reverse(inputs: LossInputs) -> TokenLoss:
    """KL(π ‖ ν): stays within what the teacher may say. What the advantage `opd` estimates from one token: GKD, arXiv
    2306.13649; On-Policy Distillation (thinkingmachines.ai/blog/on-policy-distillation).

    π = 1/4, 3/4 and ν = 1/2, 1/2: ¼ ln ½ + ¾ ln 3/2 = 0.1308.

    >>> policy, teacher = torch.tensor([[0.25]]).log(), torch.tensor([[0.5]]).log()
    >>> opd_reverse(LossInputs(candidate_log_probs=policy, teacher_top_log_probs=teacher)).loss
    tensor([0.1308])
    """
    policy, teacher = _with_rest(inputs.candidate_log_probs), _with_rest(inputs.teacher_top_log_probs)
    return _summed(policy, teacher, inputs.candidate_log_probs)


def _summed(first: Tensor, second: Tensor, like: Tensor) -> TokenLoss:
    """KL(first ‖ second) of log-probs [R, K + 1], in the dtype of `like`."""
    return unclipped((first.exp() * (first - second)).sum(-1).to(like.dtype))


def _with_rest(log_probs: Tensor) -> Tensor:
    """log-probs [R, K] and, as a last column, that of all other tokens: float64 [R, K + 1]."""
    exact = log_probs.double()
    rest = (1.0 - exact.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST)
    return torch.cat([exact, rest.log()], dim=-1)
