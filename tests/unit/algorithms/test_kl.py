"""The estimates of the KL divergence against a plain-Python reference, and what is known of their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.algorithms import kl
from rlcli.algorithms.inputs import LossInputs
from rlcli.errors import UnknownName

relaxed = settings(deadline=None)  # the first call of a torch operation is slow
log_probs = st.floats(-60.0, 0.0)
ESTIMATORS = ["k1", "k1+", "k2", "k3", "k3+", "k3_unbiased"]


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def estimate(name: str, new: Tensor, reference: Tensor, old: Tensor | None = None) -> Tensor:
    return kl.part(name)(LossInputs(log_probs=new, reference_log_probs=reference, old_log_probs=old))


def reference(name: str, new: float, old: float) -> float:
    d = min(20.0, max(-20.0, new - old))
    if name in ("k1", "k1+"):
        return d
    if name == "k2":
        return d * d / 2
    # The series of e^(−d) − 1 + d: no cancellation near 0.
    value = sum((-d) ** n / math.factorial(n) for n in range(2, 30)) if abs(d) < 1 else math.exp(-d) - 1 + d
    return value if name == "k3_unbiased" else min(10.0, max(-10.0, value))


def gradient(name: str, new: Tensor, old: Tensor) -> Tensor:
    new = new.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(estimate(name, new, old).sum(), new)
    return grad


def test_every_estimator_is_offered_and_proven_here() -> None:
    assert kl.names() == ESTIMATORS


@pytest.mark.parametrize("name", ESTIMATORS)
@relaxed
@given(pairs=st.lists(st.tuples(log_probs, log_probs), max_size=8))
def test_the_estimate_equals_the_reference(name: str, pairs: list[tuple[float, float]]) -> None:
    new, old = (float64([pair[i] for pair in pairs]) for i in range(2))
    expected = float64([reference(name, *pair) for pair in pairs])
    torch.testing.assert_close(estimate(name, new, old), expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_the_gradient_is_that_of_the_value(name: str) -> None:
    new = float64([-30.0, -19.0, -5.0, -1.0, -0.1, -1e-4]).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: estimate(name, x, torch.full_like(x, -0.5)), new)


@pytest.mark.parametrize("name", ["k1+", "k3+"])
@relaxed
@given(pairs=st.lists(st.tuples(log_probs, log_probs), max_size=8))
def test_the_gradient_of_a_straight_through_form_is_the_difference(name: str, pairs: list[tuple[float, float]]) -> None:
    new, old = (float64([pair[i] for pair in pairs]) for i in range(2))
    expected = float64([a - b if abs(a - b) <= 20 else 0.0 for a, b in pairs])
    torch.testing.assert_close(gradient(name, new, old), expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("name", "right"),
    [("k1", False), ("k1+", True), ("k2", True), ("k3", False), ("k3+", True), ("k3_unbiased", True)],
)
def test_which_expected_gradient_is_that_of_the_kl(name: str, right: bool) -> None:
    """Over a whole vocabulary, with π itself as the sampling policy, whose own gradient is not taken."""
    generator = torch.Generator().manual_seed(0)
    scores, other = torch.randn(2, 50, dtype=torch.float64, generator=generator)
    old = other.log_softmax(-1)
    scores.requires_grad_()
    new = scores.log_softmax(-1)
    (exact,) = torch.autograd.grad((new.exp() * (new - old)).sum(), scores, retain_graph=True)
    (grad,) = torch.autograd.grad((new.exp().detach() * estimate(name, new, old)).sum(), scores)
    assert torch.allclose(grad, exact, rtol=1e-9, atol=1e-12) is right


def test_the_unbiased_k3_is_unbiased_for_samples_of_another_policy() -> None:
    """Over a whole vocabulary, sampled from π_old: value and gradient are those of KL(π ‖ π_ref)."""
    generator = torch.Generator().manual_seed(0)
    scores, behaviour, other = torch.randn(3, 50, dtype=torch.float64, generator=generator) / 2
    sampled, reference = behaviour.log_softmax(-1), other.log_softmax(-1)
    scores.requires_grad_()
    new = scores.log_softmax(-1)
    exact = (new.exp() * (new - reference)).sum()
    estimated = (sampled.exp() * estimate("k3_unbiased", new, reference, sampled)).sum()
    torch.testing.assert_close(estimated, exact)
    gradients = [torch.autograd.grad(value, scores, retain_graph=True)[0] for value in (estimated, exact)]
    torch.testing.assert_close(*gradients)
    plain = (sampled.exp() * estimate("k3", new, reference)).sum()
    assert abs(plain - exact) > 1e-2


@relaxed
@given(triples=st.lists(st.tuples(log_probs, log_probs, log_probs), max_size=8))
def test_the_unbiased_k3_equals_the_reference(triples: list[tuple[float, float, float]]) -> None:
    new, old, behaviour = (float64([triple[i] for triple in triples]) for i in range(3))
    expected = [math.exp(min(20.0, max(-20.0, n - b))) * reference("k3_unbiased", n, o) for n, o, b in triples]
    torch.testing.assert_close(estimate("k3_unbiased", new, old, behaviour), float64(expected), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", ["k1", "k1+", "k3", "k3+", "k3_unbiased"])
def test_k1_and_k3_are_unbiased_over_a_whole_vocabulary(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    new, old = (torch.randn(2, 50, dtype=torch.float64, generator=generator) / 2).log_softmax(-1)
    exact = (new.exp() * (new - old)).sum()
    torch.testing.assert_close((new.exp() * estimate(name, new, old)).sum(), exact)


@pytest.mark.parametrize("name", ["k3", "k3+", "k3_unbiased"])
def test_k3_keeps_its_digits_in_float32_where_the_policies_all_but_agree(name: str) -> None:
    got = estimate(name, torch.tensor([1e-3, -1e-3]), torch.zeros(2))
    torch.testing.assert_close(got, torch.full((2,), 5e-7), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimates_and_gradients_stay_finite_at_extreme_ratios(name: str) -> None:
    new, old = torch.tensor([-1e4, 0.0, -1e30]), torch.tensor([0.0, -1e4, -1.0])
    assert torch.isfinite(estimate(name, new, old)).all()
    assert torch.isfinite(gradient(name, new, old)).all()


def test_an_unknown_estimator_is_refused_with_the_near_ones() -> None:
    with pytest.raises(UnknownName, match=r"'k33'.*k3"):
        kl.get("k33")
