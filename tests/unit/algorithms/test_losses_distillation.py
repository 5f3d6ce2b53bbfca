"""Distillation against plain float64 loops: the advantage of drawn tokens, and the losses over a teacher's top k."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.algorithms import losses
from rlcli.algorithms.advantages.tokens import opd
from rlcli.algorithms.aggregation import Denominators
from rlcli.algorithms.build import build_algorithm
from rlcli.algorithms.inputs import AdvantageInputs, LossInputs
from rlcli.algorithms.losses.distillation import LEAST_REST
from tests.loss_references import DISTILLATIONS

relaxed = settings(deadline=None, max_examples=40)
VOCABULARY, K = 7, 3
Response = list[tuple[list[float], list[float]]]
"""Of each token the policy's and the teacher's logits of the whole vocabulary."""
logits = st.lists(st.floats(-6.0, 6.0), min_size=VOCABULARY, max_size=VOCABULARY)
responses = st.lists(st.lists(st.tuples(logits, logits), max_size=4), max_size=5)


def packed(responses: list[Response], k: int = K) -> dict[str, Tensor]:
    """Inputs of the losses for the concatenated responses; the policy's logits require gradients."""
    tokens = [token for response in responses for token in response]
    shape = (len(tokens), VOCABULARY)
    policy = torch.tensor([ours for ours, _ in tokens], dtype=torch.float64).view(shape).requires_grad_()
    teacher = torch.tensor([theirs for _, theirs in tokens], dtype=torch.float64).view(shape).log_softmax(-1)
    top, ids = teacher.topk(k, dim=-1)
    lengths = torch.tensor([len(response) for response in responses], dtype=torch.int64)
    return {
        "logits": policy,
        "candidate_log_probs": policy.log_softmax(-1).gather(-1, ids),
        "teacher_top_log_probs": top,
        "sequence": torch.repeat_interleave(torch.arange(len(responses)), lengths),
        "lengths": lengths,
    }


def loss_of(name: str, inputs: dict[str, Tensor]) -> Tensor:
    columns = {name: values for name, values in inputs.items() if name != "logits"}
    term = losses.part(name)(LossInputs(**columns))
    assert not term.clipped_low.any()
    assert not term.clipped_high.any()
    return term.loss


@pytest.mark.parametrize("name", sorted(DISTILLATIONS))
@relaxed
@given(batch=responses)
def test_loss_equals_the_reference(name: str, batch: list[Response]) -> None:
    inputs = packed(batch)
    rows = zip(inputs["candidate_log_probs"].tolist(), inputs["teacher_top_log_probs"].tolist(), strict=True)
    expected = [DISTILLATIONS[name](policy, teacher, LEAST_REST) for policy, teacher in rows]
    want = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(loss_of(name, inputs).detach(), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", sorted(DISTILLATIONS))
def test_gradient_is_that_of_the_value(name: str) -> None:
    torch.manual_seed(0)
    policy, teacher = (torch.randn(5, VOCABULARY, dtype=torch.float64) for _ in range(2))
    top, ids = teacher.log_softmax(-1).topk(K, dim=-1)

    def loss(policy_logits: Tensor) -> Tensor:
        candidates = policy_logits.log_softmax(-1).gather(-1, ids)
        return loss_of(name, {"candidate_log_probs": candidates, "teacher_top_log_probs": top})

    assert torch.autograd.gradcheck(loss, policy.requires_grad_())


@pytest.mark.parametrize("name", sorted(DISTILLATIONS))
@relaxed
@given(batch=responses)
def test_the_divergence_grows_with_k_to_that_of_the_vocabulary(name: str, batch: list[Response]) -> None:
    few, several, all_but_one = (loss_of(name, packed(batch, k)) for k in (1, 4, VOCABULARY - 1))
    policy = packed(batch)["logits"].log_softmax(-1)
    teacher = torch.tensor([theirs for response in batch for _, theirs in response], dtype=torch.float64)
    teacher = teacher.view(-1, VOCABULARY).log_softmax(-1)
    first, second = (teacher, policy) if name == "opd_forward" else (policy, teacher)
    divergence = (first.exp() * (first - second)).sum(-1)
    slack = 1e-4  # where the rest is less than LEAST_REST
    assert bool((few <= several + slack).all())
    assert bool((several <= all_but_one + slack).all())
    torch.testing.assert_close(all_but_one, divergence, rtol=0, atol=slack)


@pytest.mark.parametrize("name", sorted(DISTILLATIONS))
@relaxed
@given(batch=responses, data=st.data())
def test_no_order_and_no_split_into_microbatches_changes_the_update(
    name: str, batch: list[Response], data: st.DataObject
) -> None:
    algorithm = build_algorithm(advantage="one", loss=name, correction="none")
    tokens = sum(len(response) for response in batch)

    def gradients(part: list[Response]) -> list[Tensor]:
        inputs = packed(part)
        sampled = {"log_probs": inputs["logits"].log_softmax(-1)[:, 0], "advantages": torch.ones(len(inputs["logits"]))}
        columns = {name: values for name, values in inputs.items() if name != "logits"}
        objective = algorithm.objective(LossInputs(**columns | sampled), Denominators(tokens, len(batch), 4))
        (gradient,) = torch.autograd.grad(objective.loss, inputs["logits"], allow_unused=True)
        full_gradient = torch.zeros_like(inputs["logits"]) if gradient is None else gradient
        return list(full_gradient.split(inputs["lengths"].tolist()))

    expected = gradients(batch)
    order, cut = data.draw(st.permutations(range(len(batch)))), data.draw(st.integers(0, len(batch)))
    for part in (order[:cut], order[cut:]):
        for index, gradient in zip(part, gradients([batch[index] for index in part]), strict=False):
            torch.testing.assert_close(gradient, expected[index], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(DISTILLATIONS))
def test_probabilities_of_0_and_1_give_finite_losses_and_gradients(name: str, dtype: torch.dtype) -> None:
    certain, spread = [0.0, -1e3], [-0.6931, -0.6932]
    policy = torch.tensor([certain, certain[::-1], spread, certain], dtype=dtype, requires_grad=True)
    theirs = torch.tensor([certain, certain, certain, spread], dtype=dtype)
    loss = loss_of(name, {"candidate_log_probs": policy, "teacher_top_log_probs": theirs})
    (gradient,) = torch.autograd.grad(loss.sum(), policy)
    assert loss.dtype == dtype
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()
    assert float(loss[0].detach()) == pytest.approx(0.0, abs=1e-6)


@relaxed
@given(log_prob_pairs=st.lists(st.tuples(st.floats(-9.0, 0.0), st.floats(-9.0, 0.0)), max_size=9))
def test_the_advantage_is_how_much_likelier_the_teacher_finds_a_token(
    log_prob_pairs: list[tuple[float, float]],
) -> None:
    old, teacher = (torch.tensor([pair[side] for pair in log_prob_pairs], dtype=torch.float64) for side in (0, 1))
    token_advantages = opd(AdvantageInputs(old_log_probs=old, teacher_log_probs=teacher))
    assert token_advantages.returns is None
    assert token_advantages.advantages.tolist() == [theirs - policy for policy, theirs in log_prob_pairs]


def test_the_expected_gradient_of_the_advantage_is_that_of_the_divergence() -> None:
    """Summed over all tokens that π may draw, each with its probability: exactly, not in the limit of many samples."""
    torch.manual_seed(1)
    policy = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(VOCABULARY, dtype=torch.float64).log_softmax(-1)
    log_probs = policy.log_softmax(-1)
    inputs = AdvantageInputs(old_log_probs=log_probs.detach(), teacher_log_probs=teacher)
    advantages = opd(inputs).advantages
    surrogate = -(log_probs.detach().exp() * advantages * (log_probs - log_probs.detach()).exp()).sum()
    divergence = (log_probs.exp() * (log_probs - teacher)).sum()
    actual, expected = (torch.autograd.grad(term, policy, retain_graph=True)[0] for term in (surrogate, divergence))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_what_a_teacher_is_needed_for() -> None:
    sampled, top = build_algorithm(advantage="opd"), build_algorithm(advantage="one", loss="opd_reverse")
    plain = build_algorithm()
    assert (sampled.needs_teacher, sampled.needs_teacher_top, sampled.is_token_level) == (True, False, True)
    assert (top.needs_teacher, top.needs_teacher_top, top.is_token_level) == (True, True, False)
    assert (plain.needs_teacher, plain.needs_teacher_top) == (False, False)
    assert sampled.needs_old_log_probs(1)
    assert not top.needs_old_log_probs(1)
    assert not sampled.skips_zero_advantages
    assert not top.skips_zero_advantages


def test_the_sums_tell_how_far_the_teacher_is() -> None:
    algorithm = build_algorithm(advantage="opd", correction="none")
    inputs: dict[str, Any] = {
        "log_probs": torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True),
        "teacher_log_probs": torch.tensor([-0.5, -4.0, -0.5], dtype=torch.float64),
        "teacher_agrees": torch.tensor([True, False, True]),
        "advantages": torch.tensor([0.5, -2.0, 0.0], dtype=torch.float64),
        "sequence": torch.tensor([0, 0, 1]),
        "lengths": torch.tensor([2, 1]),
    }
    sums = algorithm.objective(LossInputs(**inputs), Denominators(3, 2, 4)).sums
    assert float(sums["teacher_kl"]) == math.fsum([-0.5, 2.0, 0.0])
    assert float(sums["teacher_agreement"]) == 2.0
    masked = inputs | {"kept": torch.tensor([True, False, True])}
    assert float(algorithm.objective(LossInputs(**masked), Denominators(2, 2, 4)).sums["teacher_kl"]) == -0.5
