"""Every policy loss: against its plain reference, its gradient, and what must hold of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.algorithms import losses
from rlcli.algorithms.aggregation import Denominators, seq_mean_token_mean
from rlcli.algorithms.function_registry import options_of
from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.losses.base import TokenLoss, ratio
from rlcli.errors import UnknownName
from tests.loss_references import DISTILLATIONS, REFERENCES, Response, Responses, packed, rho_of

relaxed = settings(deadline=None, max_examples=40)  # the first call of a torch operation is slow
NEEDED: dict[str, dict[str, Any]] = {"dro": {"beta": 0.7}}  # options without a default
OTHER: dict[str, dict[str, Any]] = {  # than the defaults
    "ppo": {"clip_low": 0.0, "clip_high": 2.0, "dual_clip": 3.5},
    "cispo": {"clip_low": 0.3, "clip_high": 4.0},
    "sapo": {"tau_positive": 0.5, "tau_negative": 3.0},
    "dppo_tv": {"clip_low": 0.01, "clip_high": 0.4},
    "gspo": {"clip_low": 0.2, "clip_high": 0.5},
    "gmpo": {"clip_low": 0.1, "clip_high": 1.0},
    "clip_cov": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0},
    "kl_cov": {"cov_coef": 0.3},
    "dro": {"beta": 0.01},
    "dpo": {"beta": 2.0},
    "sppo": {"eta": 3.0},
}


def term_of(name: str, responses: Responses, **options: Any) -> TokenLoss:
    return losses.part(name, NEEDED.get(name, {}) | options)(LossInputs(**packed(responses)))


def gradients(name: str, responses: Responses, sequences: int) -> list[list[float]]:
    """Of seq-mean-token-mean over `sequences`, with respect to the log-probs of each response."""
    inputs = packed(responses)
    term = losses.part(name, NEEDED.get(name, {}))(LossInputs(**inputs))
    denominators = Denominators(tokens=0, sequences=sequences, max_length=0)
    total = seq_mean_token_mean(term.loss, LossInputs(**inputs), denominators)
    (gradient,) = torch.autograd.grad(total, inputs["log_probs"])
    return [part.tolist() for part in gradient.split(inputs["lengths"].tolist())]


@st.composite
def pairs_of_responses(draw: st.DrawFn, max_pairs: int = 3) -> list[tuple[Response, Response]]:
    """Pairs with one preferred response, or none; any response may be empty."""
    log_probs = st.floats(-60.0, 0.0) | st.floats(-2.0, 0.0)
    old = st.none() | st.floats(-0.5, 0.5) | log_probs  # the same, near, or anywhere
    pairs = []
    for label in draw(st.lists(st.integers(-(2**40), 2**40), unique=True, max_size=max_pairs)):
        sizes = draw(st.sampled_from([(1.0, -1.0), (-0.25, 2.0), (0.0, 0.0), (3.5, -1e-3)]))
        members = []
        for advantage in sizes:
            tokens = draw(st.lists(st.tuples(log_probs, old, log_probs, st.booleans()), max_size=4))
            new = [token[0] for token in tokens]
            olds = [n if o is None else min(0.0, n + o) if o > -0.5 else o for n, o, _, _ in tokens]
            reference, selected = [token[2] for token in tokens], [token[3] for token in tokens]
            members.append(Response(new, olds, reference, advantage, label, selected))
        pairs.append((members[0], members[1]))
    return pairs


def near(label: int, advantage: float, differences: list[float]) -> Response:
    """A response whose log-ratios are these: away from every kink if none is 0, ±0.4 or a clip's bound."""
    old = [-0.7 - 0.3 * i for i in range(len(differences))]
    new = [o + d for o, d in zip(old, differences, strict=True)]
    return Response(new, old, [o - 0.2 for o in old], advantage, label, [i % 2 == 1 for i in range(len(old))])


SMOOTH = [
    near(4, 0.7, [0.05, -0.1, 0.15]),
    near(4, -1.3, [0.5, -0.55]),
    near(1, -0.2, []),
    near(1, 1.1, [0.6, 1.5, -3.0, 0.3]),
    near(9, -2.0, [1.5, -0.3, 0.9]),
    near(9, 0.4, [-0.9]),
]


def test_every_loss_has_a_reference_and_every_option_is_tried() -> None:
    ours = {name for name in losses.names() if losses.get(name).__module__.startswith("rlcli.")}
    assert ours == set(REFERENCES) | set(DISTILLATIONS)
    for name in ours:
        assert set(options_of(losses.get(name))) == set(OTHER.get(name, {}))


@pytest.mark.parametrize("other", [False, True], ids=["defaults", "other options"])
@pytest.mark.parametrize("name", sorted(REFERENCES))
@relaxed
@given(pairs=pairs_of_responses(), data=st.data())
def test_loss_equals_the_reference(
    name: str, other: bool, pairs: list[tuple[Response, Response]], data: st.DataObject
) -> None:
    responses = data.draw(st.permutations([response for pair in pairs for response in pair]))
    options = NEEDED.get(name, {}) | (OTHER.get(name, {}) if other else {})
    expected = [term for response in REFERENCES[name](responses, **options) for term in response]
    got = term_of(name, responses, **options)
    want = torch.tensor([term.loss for term in expected], dtype=torch.float64)
    torch.testing.assert_close(got.loss, want, rtol=1e-10, atol=1e-10)
    assert got.clipped_low.tolist() == [term.clipped_low for term in expected]
    assert got.clipped_high.tolist() == [term.clipped_high for term in expected]


@pytest.mark.parametrize("name", sorted(set(REFERENCES) - {"cispo", "gspo"}))
def test_gradient_is_that_of_the_value(name: str) -> None:
    inputs = packed(SMOOTH)

    def loss(log_probs: Tensor) -> Tensor:
        return losses.part(name, NEEDED.get(name, {}))(LossInputs(**inputs | {"log_probs": log_probs})).loss

    assert torch.autograd.gradcheck(loss, inputs["log_probs"])


@pytest.mark.parametrize("name", ["cispo", "dppo_tv", "clip_cov", "gspo"])
@relaxed
@given(pairs=pairs_of_responses())
def test_gradient_is_the_one_that_the_paper_states(name: str, pairs: list[tuple[Response, Response]]) -> None:
    responses = [response for pair in pairs for response in pair]
    terms = REFERENCES[name](responses)
    for response, token_terms, got in zip(responses, terms, gradients(name, responses, len(responses)), strict=True):
        tokens = list(zip(response.new, response.old, strict=True))
        if name == "gspo":  # one ratio for all tokens
            mean = sum(new - old for new, old in tokens) / max(1, len(tokens))
            tokens = [(mean, 0.0)] * len(tokens)
        weights = []  # of −A·∇log π
        for (new, old), term, selected in zip(tokens, token_terms, response.selected, strict=True):
            stopped = term.clipped_low or term.clipped_high or abs(new - old) > 20
            if name == "cispo":
                weights.append(min(rho_of(new, old), 1.2))
            else:
                weights.append(0.0 if stopped or (name == "clip_cov" and selected) else rho_of(new, old))
        scale = -response.advantage / max(1, len(weights)) / len(responses)
        assert got == pytest.approx([scale * weight for weight in weights], rel=1e-9, abs=1e-12)


def test_gspo_in_its_token_form_has_the_gradient_of_its_sequence_form() -> None:
    responses = [
        near(0, 1.0, [2e-4, -1e-4, 3e-4]),
        near(0, -1.0, [-1e-4, 2e-4]),
        near(1, 1.0, [0.3]),
        near(1, -2.0, [9]),
    ]
    expected = []
    total = torch.zeros((), dtype=torch.float64)
    for response in responses:
        new = torch.tensor(response.new, dtype=torch.float64, requires_grad=True)
        s = (new - torch.tensor(response.old, dtype=torch.float64)).mean().exp()
        bounded = s.clamp(1 - 3e-4, 1 + 4e-4)
        total = total - torch.minimum(response.advantage * s, response.advantage * bounded) / len(responses)
        expected.append(new)
    want = [gradient.tolist() for gradient in torch.autograd.grad(total, expected)]
    got = gradients("gspo", responses, len(responses))
    assert want[2] == [0.0]
    assert want[3] != [0.0]
    for actual, other in zip(got, want, strict=True):
        assert actual == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("name", sorted(REFERENCES))
@relaxed
@given(pairs=pairs_of_responses(max_pairs=4), data=st.data())
def test_no_order_and_no_split_into_microbatches_changes_the_update(
    name: str, pairs: list[tuple[Response, Response]], data: st.DataObject
) -> None:
    flattened = [response for pair in pairs for response in pair]
    expected = dict(zip(map(id, flattened), gradients(name, flattened, len(flattened)), strict=True))
    shuffled = data.draw(st.permutations(pairs))
    cut = data.draw(st.integers(0, len(pairs)))
    for part in (shuffled[:cut], shuffled[cut:]):  # the responses of a pair stay together
        responses = data.draw(st.permutations([response for pair in part for response in pair]))
        for response, gradient in zip(responses, gradients(name, responses, len(flattened)), strict=True):
            assert gradient == pytest.approx(expected[id(response)], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_extreme_ratios_give_finite_losses_and_gradients(name: str, dtype: torch.dtype) -> None:
    responses = []
    for label, (advantage, other) in enumerate([(1.0, -1.0), (-1.0, 1.0), (0.0, 0.0)]):
        responses.append(Response([-1e3, 0.0], [0.0, -1e3], [0.0, -1e3], advantage, label, [True, True]))
        responses.append(Response([0.0], [-1e3], [-1e3], other, label, [False]))
        responses.append(Response([-1e3], [0.0], [0.0], advantage, label + 3, [False]))
        responses.append(Response([0.0], [-1e3], [-1e3], other, label + 3, [True]))
    inputs = packed(responses, dtype)
    term = losses.part(name, NEEDED.get(name, {}))(LossInputs(**inputs))
    (gradient,) = torch.autograd.grad(term.loss.sum(), inputs["log_probs"])
    assert term.loss.dtype == dtype
    assert torch.isfinite(term.loss).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("responses", [[], [near(0, 0.0, []), near(0, 0.0, [])]], ids=["none", "empty ones"])
@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_a_microbatch_without_tokens_has_an_empty_loss_with_a_gradient(name: str, responses: Responses) -> None:
    inputs = packed(responses)
    term = losses.part(name, NEEDED.get(name, {}))(LossInputs(**inputs))
    (gradient,) = torch.autograd.grad(term.loss.sum(), inputs["log_probs"])
    for empty in (*vars(term).values(), gradient):
        assert empty.shape == (0,)


@pytest.mark.parametrize("dual", [None, 3.0])
def test_ppo_gradient_stops_exactly_at_clipped_tokens(dual: float | None) -> None:
    ratios = [0.01, 0.5, 0.79, 0.81, 0.999, 1.001, 1.19, 1.21, 2.0, 2.9, 3.1, 50.0]
    new = torch.tensor(ratios * 2, dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([1.5] * len(ratios) + [-0.5] * len(ratios), dtype=torch.float64)
    inputs = LossInputs(log_probs=new, old_log_probs=torch.zeros_like(new), advantages=advantages)
    term = losses.clipped.ppo(inputs, dual_clip=dual)
    (gradient,) = torch.autograd.grad(term.loss.sum(), new)
    assert (gradient == 0).tolist() == (term.clipped_low | term.clipped_high).tolist()


@pytest.mark.parametrize("name", ["ppo", "clip_cov", "gspo", "gmpo", "cispo", "sapo", "dppo_tv", "kl_cov", "gpg"])
def test_at_ratio_one_the_gradient_is_the_policy_gradient(name: str) -> None:
    responses = [near(0, 1.0, [0.0, 0.0]), near(0, -2.0, [0.0]), near(1, 0.0, [0.0]), near(1, 0.5, [])]
    responses = [response._replace(selected=[name == "kl_cov"] * len(response.new)) for response in responses]
    assert gradients(name, responses, 4) == [[-0.125, -0.125], [0.5], [0.0], []]
    term = term_of(name, responses)
    assert not (term.clipped_low | term.clipped_high).any()


def test_dppo_stops_only_moves_further_along_the_advantage() -> None:
    new, old = torch.tensor([0.7, 0.3, 0.7, 0.3, 0.6, 0.4]), torch.tensor([0.5] * 6)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, -1.0])
    term = losses.clipped.dppo_tv(LossInputs(log_probs=new.log(), old_log_probs=old.log(), advantages=advantages))
    assert term.clipped_high.tolist() == [True, False, False, False, False, False]
    assert term.clipped_low.tolist() == [False, False, False, True, False, False]
    torch.testing.assert_close(term.loss, torch.tensor([0.0, -0.6, 1.4, 0.0, -1.2, 0.8]))


def test_a_dual_clip_below_its_bound_keeps_the_policy_gradient() -> None:
    new = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    inputs = LossInputs(log_probs=new, old_log_probs=new.detach(), advantages=advantages)
    term = losses.clipped.ppo(inputs, clip_low=0.0, clip_high=0.0, dual_clip=2.0)
    (gradient,) = torch.autograd.grad(term.loss.sum(), new)
    assert gradient.tolist() == [-1.0, 2.0, 0.0]


def test_an_empty_response_leaves_the_weight_of_its_pair_to_the_other() -> None:
    responses = [near(0, 1.0, [0.1, 0.2]), near(0, -1.0, []), near(1, 1.0, [0.1, 0.2]), near(1, -1.0, [0.3])]
    inputs = packed(responses)
    loss = losses.part("dpo")(LossInputs(**inputs)).loss
    mean = seq_mean_token_mean(loss, LossInputs(**inputs), Denominators(5, 4, 9))
    h = [sum(response.new) - sum(response.reference) for response in responses]
    of_pairs = torch.tensor([0.1 * h[0], 0.1 * (h[2] - h[3])], dtype=torch.float64)
    torch.testing.assert_close(mean, -of_pairs.sigmoid().log().mean())


def test_a_response_without_its_partner_is_not_trained_on() -> None:
    with pytest.raises(AssertionError, match=r"\[7\]"):
        term_of("dpo", [near(7, 1.0, [0.1]), near(8, 1.0, [0.1]), near(8, -1.0, [0.1])])


def test_gspo_sees_bounds_of_a_few_ten_thousandths_in_float32() -> None:
    tokens = 4096
    old = -torch.rand(tokens, generator=torch.Generator().manual_seed(0)) * 5
    inputs = LossInputs(
        old_log_probs=old,
        advantages=torch.ones(tokens),
        sequence=torch.zeros(tokens, dtype=torch.int64),
        lengths=torch.tensor([tokens]),
    )
    for drift, clipped in [(3.9e-4, False), (4.1e-4, True)]:
        term = losses.sequence.gspo(inputs.replace(log_probs=(old.double() + drift).float()))
        assert term.clipped_high.tolist() == [clipped] * tokens


def test_the_ratio_is_clamped_without_a_gradient() -> None:
    new = torch.tensor([-25.0, -15.0, 0.0], requires_grad=True)
    rho = ratio(new, torch.tensor([0.0, 0.0, -25.0]))
    (gradient,) = torch.autograd.grad(rho.sum(), new)
    torch.testing.assert_close(rho, torch.tensor([-20.0, -15.0, 20.0]).exp())
    assert (gradient != 0).tolist() == [False, True, False]


def test_an_unknown_name_is_refused_with_the_near_ones() -> None:
    with pytest.raises(UnknownName, match=r"'pp0'.*ppo"):
        losses.get("pp0")
    with pytest.raises(UnknownName, match=r"token selection.*'kl_kov'.*kl_cov"):
        losses.selectors.get("kl_kov")
