"""The composed algorithm: its value and gradient, and that neither knows how a minibatch was split."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.algorithms import aggregation
from rlcli.algorithms.aggregation import Denominators
from rlcli.algorithms.algorithm import Algorithm, Objective
from rlcli.config.schema import Algorithm as Section
from rlcli.errors import UnknownName

LONGEST = 12
relaxed = settings(deadline=None)  # the first call of a torch operation is slow


def build(**changes: Any) -> Algorithm:
    """The algorithm of the configuration's defaults, with some keys changed."""
    return Algorithm.build(**(Section().model_dump() | changes))


@dataclass
class Response:
    """One response: its advantage, and log π, log π_old, log π_ref of each token."""

    advantage: float
    new: list[float]
    old: list[float]
    reference: list[float]


def responses_of(lengths: list[int], seed: int, spread: float = 0.5) -> list[Response]:
    draw = random.Random(seed)
    made = []
    for length in lengths:
        new = [draw.uniform(-3.0, 0.0) for _ in range(length)]
        old, reference = ([value + draw.gauss(0.0, spread) for value in new] for _ in range(2))
        made.append(Response(draw.choice([0.0, draw.gauss(0.0, 1.0)]), new, old, reference))
    return made


def whole(responses: list[Response]) -> Denominators:
    return Denominators(sum(len(r.new) for r in responses), len(responses), LONGEST)


def run(algorithm: Algorithm, responses: list[Response], denominators: Denominators) -> tuple[Objective, Tensor]:
    """The objective of one micro-batch, and its gradient for each of its tokens."""

    def column(name: str) -> Tensor:
        return torch.tensor([value for r in responses for value in getattr(r, name)], dtype=torch.float64)

    lengths = [len(r.new) for r in responses]
    sequence = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64)
    advantages = torch.tensor([r.advantage for r in responses], dtype=torch.float64)[sequence]
    new = column("new").requires_grad_()
    reference = column("reference") if algorithm.needs_reference else None
    counts = torch.tensor(lengths, dtype=torch.int64)
    objective = algorithm.objective(new, column("old"), reference, advantages, sequence, counts, denominators)
    (gradient,) = torch.autograd.grad(objective.loss, new)
    return objective, gradient


def objective_reference(responses: list[Response], section: Section) -> tuple[float, dict[str, float]]:
    """GRPO's objective as its paper writes it, in loops, with the KL in the loss."""
    sums = dict.fromkeys(["tokens", "policy_loss", "clip_low_tokens", "clip_high_tokens", "ratio_abs_dev"], 0.0)
    if section.kl_coef:
        sums["kl"] = 0.0
    by_response = []
    for r in responses:
        total = 0.0
        for new, old, reference in zip(r.new, r.old, r.reference, strict=True):
            rho = math.exp(new - old)
            clipped = min(max(rho, 1 - section.clip_low), 1 + section.clip_high)
            policy = -min(rho * r.advantage, clipped * r.advantage)
            d = new - reference
            divergence = math.exp(-d) - 1 + d
            total += policy + section.kl_coef * divergence
            sums["tokens"] += 1
            sums["policy_loss"] += policy
            sums["clip_low_tokens"] += r.advantage < 0 and rho < 1 - section.clip_low
            sums["clip_high_tokens"] += r.advantage > 0 and rho > 1 + section.clip_high
            sums["ratio_abs_dev"] += abs(rho - 1)
            if section.kl_coef:
                sums["kl"] += divergence
        by_response.append(total)
    n = len(responses)
    loss = {
        "token-mean": sum(by_response) / max(sums["tokens"], 1.0),
        "seq-mean-token-sum": sum(by_response) / n,
        "seq-mean-token-mean": sum(x / max(len(r.new), 1) for x, r in zip(by_response, responses, strict=True)) / n,
        "seq-mean-token-sum-norm": sum(by_response) / n / LONGEST,
    }
    return loss[section.aggregation], sums


ragged = st.lists(st.integers(0, LONGEST), min_size=1, max_size=8)
seeds = st.integers(0, 2**32)
kl_coefs = st.sampled_from([0.0, 0.1])


@pytest.mark.parametrize("aggregation_name", aggregation.names())
@relaxed
@given(lengths=ragged, seed=seeds, kl_coef=kl_coefs)
def test_objective_equals_the_paper(aggregation_name: str, lengths: list[int], seed: int, kl_coef: float) -> None:
    section = Section(kl_coef=kl_coef, clip_high=0.28, aggregation=aggregation_name)
    responses = responses_of(lengths, seed)
    objective, _ = run(Algorithm.build(**section.model_dump()), responses, whole(responses))
    loss, sums = objective_reference(responses, section)
    assert objective.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert {name: value.item() for name, value in objective.sums.items()} == pytest.approx(sums, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("aggregation_name", aggregation.names())
@relaxed
@given(lengths=ragged, seed=seeds, kl_coef=kl_coefs, parts=st.integers(1, 5))
def test_any_split_adds_up_to_the_whole(
    aggregation_name: str, lengths: list[int], seed: int, kl_coef: float, parts: int
) -> None:
    algorithm = build(kl_coef=kl_coef, aggregation=aggregation_name, dual_clip=1.5)
    responses = responses_of(lengths, seed)
    denominators = whole(responses)
    expected, gradient = run(algorithm, responses, denominators)
    gradient_of = dict(enumerate(gradient.split(lengths)))

    # A part may be empty: ranks run the same number of micro-batches, whether or not they have samples left.
    order = list(range(len(responses)))
    random.Random(seed).shuffle(order)
    loss, sums = 0.0, dict.fromkeys(expected.sums, 0.0)
    for part in (order[i::parts] for i in range(parts)):
        objective, part_gradient = run(algorithm, [responses[i] for i in part], denominators)
        loss += objective.loss.item()
        sums = {name: total + objective.sums[name].item() for name, total in sums.items()}
        for i, got in zip(part, part_gradient.split([lengths[i] for i in part]), strict=True):
            torch.testing.assert_close(got, gradient_of[i], rtol=1e-9, atol=1e-12)
    assert loss == pytest.approx(expected.loss.item(), rel=1e-9, abs=1e-12)
    assert sums == pytest.approx({name: v.item() for name, v in expected.sums.items()}, rel=1e-9, abs=1e-12)


@relaxed
@given(lengths=ragged, seed=seeds)
def test_leaving_out_a_zero_advantage_sample_changes_nothing_when_there_are_no_token_terms(
    lengths: list[int], seed: int
) -> None:
    algorithm = build()
    assert not algorithm.has_token_terms
    responses = responses_of(lengths, seed)
    everything, gradient = run(algorithm, responses, whole(responses))
    active, rest = run(algorithm, [r for r in responses if r.advantage != 0.0], whole(responses))
    assert active.loss.item() == pytest.approx(everything.loss.item(), rel=1e-9, abs=1e-12)
    assert gradient.abs().sum().item() == pytest.approx(rest.abs().sum().item(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("aggregation_name", aggregation.names())
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_objective_gradient_is_right(aggregation_name: str, estimator: str) -> None:
    algorithm = build(kl_coef=0.3, kl_estimator=estimator, aggregation=aggregation_name, dual_clip=1.5)
    responses = responses_of([3, 0, 7, 1], seed=5)
    columns = {name: [x for r in responses for x in getattr(r, name)] for name in ("new", "old", "reference")}
    new, old, reference = (torch.tensor(values, dtype=torch.float64) for values in columns.values())
    sequence = torch.tensor([0] * 3 + [2] * 7 + [3])
    advantages = torch.tensor([0.7, 1.0, -1.2, 0.4], dtype=torch.float64)[sequence]

    def loss(log_probs: Tensor) -> Tensor:
        lengths = torch.tensor([3, 0, 7, 1])
        return algorithm.objective(log_probs, old, reference, advantages, sequence, lengths, whole(responses)).loss

    assert torch.autograd.gradcheck(loss, new.requires_grad_())


def test_without_old_log_probs_the_gradient_is_the_plain_policy_gradient() -> None:
    new = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    sequence, advantages = torch.tensor([0, 0, 1]), torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64)
    objective = build().objective(
        new, None, None, advantages, sequence, torch.tensor([2, 1]), Denominators(tokens=6, sequences=3, max_length=9)
    )
    objective.loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-2 / 6, -2 / 6, 1 / 6])
    assert objective.sums["ratio_abs_dev"].item() == 0.0
    assert not any(value.requires_grad for value in objective.sums.values())


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_an_empty_micro_batch_has_a_zero_loss_to_go_backward_from_and_the_usual_sums(kl_coef: float) -> None:
    algorithm = build(kl_coef=kl_coef)
    full, _ = run(algorithm, responses_of([3], seed=0), Denominators(3, 1, LONGEST))
    empty, gradient = run(algorithm, [], Denominators(3, 1, LONGEST))
    assert empty.loss.item() == 0.0
    assert gradient.shape == (0,)
    assert {name: value.item() for name, value in empty.sums.items()} == dict.fromkeys(full.sums, 0.0)


def test_a_kl_term_asks_for_a_reference_and_keeps_zero_advantages_active() -> None:
    assert build(kl_coef=0.1).needs_reference
    assert build(kl_coef=0.1).has_token_terms
    assert not build(kl_coef=0.0).needs_reference


def test_old_log_probs_are_needed_from_the_second_update_on() -> None:
    assert [build().needs_old_log_probs(updates) for updates in (1, 2, 4)] == [False, True, True]


def test_permuting_responses_permutes_their_advantages() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.3]), torch.tensor([0, 1, 0, 1, 0])
    order = torch.tensor([3, 0, 4, 2, 1])
    for name in ("grpo", "dr_grpo", "rloo"):
        algorithm = build(advantage=name)
        permuted = algorithm.advantages(rewards[order], groups[order])
        torch.testing.assert_close(permuted, algorithm.advantages(rewards, groups)[order])


def test_a_reward_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(AssertionError, match="not finite"):
        build().advantages(torch.tensor([1.0, float("nan")]), torch.tensor([0, 0]))


@pytest.mark.parametrize("key", ["advantage", "loss", "kl_estimator", "aggregation"])
def test_every_part_is_looked_up_by_name(key: str) -> None:
    with pytest.raises(UnknownName, match="nonesuch"):
        build(**{key: "nonesuch"})


def test_importing_the_algorithms_loads_torch_but_no_engine_and_no_configuration() -> None:
    unwanted = {"ray", "vllm", "transformers", "pydantic", "rlcli.config"}
    code = f"import sys, rlcli.algorithms.algorithm; print(sorted({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
