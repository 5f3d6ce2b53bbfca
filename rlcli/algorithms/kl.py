"""Estimates of KL(π ‖ π_ref) from the sampled tokens alone (Schulman, http://joschu.net/blog/kl-approx.html).

Every function takes `LossInputs`, of which it may declare `log_probs` (float [R], log π, with gradient),
`reference_log_probs` (float [R], log π_ref) and `old_log_probs` (float [R], log π_old, from which the tokens were
sampled; absent: π itself), and returns one estimate a token (float [R]). d = clamp(log π − log π_ref, ±20); beyond the
clamp there is no gradient.

A good estimate does not imply a good gradient: that of the KL is E[d ∇log π], which of k1, k2 and k3 only k2 has (Tang
and Munos, arXiv 2506.09477). `k1+` and `k3+` have the values of k1 and k3 and the gradient of k2 (names as in verl).
"""

from __future__ import annotations

from collections.abc import Callable

from rlcli.algorithms.function_registry import FunctionRegistry
from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.lazy import Tensor, torch
from rlcli.algorithms.losses.base import ratio

KlFunction = Callable[..., Tensor]
"""Takes `LossInputs`, and options."""

PAIR = ("log_probs", "reference_log_probs")
COLUMNS = frozenset({*PAIR, "old_log_probs"})
"""The columns that an estimate may declare."""

_kl: FunctionRegistry[Tensor] = FunctionRegistry("KL estimator", ("inputs",), lambda rules: COLUMNS)
get = _kl.get
part = _kl.part
names = _kl.names
register = _kl.register
rules = _kl.rules


@_kl.register("k1", needs=PAIR, only_in_reward=True)
def k1(inputs: LossInputs) -> Tensor:
    """d: unbiased, high variance. As a loss term its expected gradient is 0: use it only for measurement.

    >>> k1(LossInputs(log_probs=torch.tensor([0.5, -0.5]), reference_log_probs=torch.zeros(2)))
    tensor([ 0.5000, -0.5000])
    """
    return _difference(inputs)


@_kl.register("k2", needs=PAIR)
def k2(inputs: LossInputs) -> Tensor:
    """d² / 2: biased, low variance; its gradient is that of the KL itself if π is the sampling policy.

    >>> k2(LossInputs(log_probs=torch.tensor([0.5, -0.5]), reference_log_probs=torch.zeros(2)))
    tensor([0.1250, 0.1250])
    """
    return _difference(inputs).square() / 2


@_kl.register("k3", needs=PAIR)
def k3(inputs: LossInputs) -> Tensor:
    """e^(−d) − 1 + d, at most 10: unbiased, never negative, low variance. Used by GRPO, arXiv 2402.03300.

    At d = ln 2 it is 1/2 − 1 + 0.6931, at d = −ln 2 it is 2 − 1 − 0.6931; e^20 is capped at 10:

    >>> log_probs = torch.tensor([2.0, 0.5, 1e-30]).log()
    >>> k3(LossInputs(log_probs=log_probs, reference_log_probs=torch.zeros(3)))
    tensor([ 0.1931,  0.3069, 10.0000])
    """
    difference = _difference(inputs)
    # expm1 keeps the digits that e^(−d) − 1 loses when the two policies nearly agree.
    return (torch.expm1(-difference) + difference).clamp(-10.0, 10.0)


@_kl.register("k1+", needs=PAIR)
def k1_plus(inputs: LossInputs) -> Tensor:
    """d, with the gradient of k2, which is d.

    >>> log_probs = torch.tensor([0.5, -0.5], requires_grad=True)
    >>> inputs = LossInputs(log_probs=log_probs, reference_log_probs=torch.zeros(2))
    >>> k1_plus(inputs).tolist()
    [0.5, -0.5]
    >>> torch.autograd.grad(k1_plus(inputs).sum(), log_probs)
    (tensor([ 0.5000, -0.5000]),)
    """
    return _straight_through(k1, inputs)


@_kl.register("k3+", needs=PAIR)
def k3_plus(inputs: LossInputs) -> Tensor:
    """e^(−d) − 1 + d, at most 10, with the gradient of k2, which is d (that of k3 itself is 1 − e^(−d)).

    >>> log_probs = torch.tensor([2.0, 0.5]).log().requires_grad_()
    >>> inputs = LossInputs(log_probs=log_probs, reference_log_probs=torch.zeros(2))
    >>> k3_plus(inputs).detach()
    tensor([0.1931, 0.3069])
    >>> torch.autograd.grad(k3_plus(inputs).sum(), log_probs)
    (tensor([ 0.6931, -0.6931]),)
    """
    return _straight_through(k3, inputs)


@_kl.register("k3_unbiased", needs=(*PAIR, "old_log_probs"))
def k3_unbiased(inputs: LossInputs) -> Tensor:
    """ρ(e^(−d) − 1 + d), ρ = π / π_old: unbiased value and gradient, however far π has moved since π_old sampled.

    DeepSeek-V3.2, arXiv 2512.02556; TRL's `use_bias_correction_kl`. ρ carries a gradient, too: ρ·d·∇log π in total,
    whose expectation over π_old is that of the KL; so nothing is capped at 10 as in `k3`. Without old_log_probs π_old
    is π, ρ = 1, and the gradient is d.

    At d = ln 2 and ρ = 2 the value is 2 · 0.1931 and the gradient 2 · 0.6931:

    >>> log_probs = torch.tensor([2.0]).log().requires_grad_()
    >>> zero = torch.zeros(1)
    >>> estimate = k3_unbiased(LossInputs(log_probs=log_probs, reference_log_probs=zero, old_log_probs=zero))
    >>> estimate.detach(), torch.autograd.grad(estimate.sum(), log_probs)
    (tensor([0.3863]), (tensor([1.3863]),))
    """
    log_probs = inputs.log_probs
    old = inputs.old_log_probs if inputs.has("old_log_probs") else log_probs.detach()
    difference = _difference(inputs)
    return ratio(log_probs, old) * (torch.expm1(-difference) + difference)


def _straight_through(value: KlFunction, inputs: LossInputs) -> Tensor:
    surrogate = k2(inputs)
    return value(inputs).detach() + (surrogate - surrogate.detach())


def _difference(inputs: LossInputs) -> Tensor:
    return (inputs.log_probs - inputs.reference_log_probs).clamp(-20.0, 20.0)
