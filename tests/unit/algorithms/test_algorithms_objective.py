"""The composed objective: its value and gradient, and that neither knows how a minibatch was split."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.algorithms import aggregation, correction, kl, losses
from rlcli.algorithms.aggregation import Denominators
from rlcli.algorithms.algorithm import Algorithm, Objective
from rlcli.algorithms.build import build_algorithm
from rlcli.algorithms.correction.base import Corrections
from rlcli.algorithms.inputs import LossInputs
from rlcli.config.schema import Algorithm as Section
from tests.loss_references import REFERENCES, Response, packed, rho_of

LONGEST = 6
NEEDED: dict[str, dict[str, float]] = {"dro": {"beta": 0.7}}  # options without a default
LOSSES = sorted(REFERENCES)
AGGREGATIONS = aggregation.names()
few = settings(deadline=None, max_examples=8)  # of each combination; the first call of a torch operation is slow


def build(**changes: Any) -> Algorithm:
    """The algorithm of the configuration's defaults, with some keys changed."""
    loss = changes.get("loss", "ppo")
    fitting = {"select": "pairs"} if loss == "dpo" else {}
    return build_algorithm(**(Section().model_dump() | fitting | {"options": NEEDED.get(loss, {})} | changes))


@dataclass
class Row:
    """One response: what losses see of it, the engine's log-probs, whether it is right, and its prompt."""

    response: Response
    rollout: list[float]
    right: bool
    group: int


def rows_of(lengths: list[int], seed: int, zeros: float = 0.2) -> list[Row]:
    """Two responses an entry, of that length and of another, which are a pair; some pairs have advantages of 0."""
    draw = random.Random(seed)
    rows = []
    for pair, longer in enumerate(lengths):
        size = 0.0 if draw.random() < zeros else draw.uniform(0.1, 2.0)
        for length, advantage in ((longer, size), (draw.randint(0, longer), -size)):
            old = [draw.uniform(-3.0, -0.1) for _ in range(length)]
            new, reference, rollout = ([min(0.0, o + draw.gauss(0.0, 0.5)) for o in old] for _ in range(3))
            selected = [draw.random() < 0.3 for _ in old]
            response = Response(new, old, reference, advantage, pair, selected)
            rows.append(Row(response, rollout, draw.random() < 0.5, pair // 2))
    return rows


@dataclass(frozen=True)
class Minibatch:
    """Totals of a minibatch, however it is split into forward passes."""

    denominators: Denominators
    right_tokens: int
    group_tokens: dict[int, int]

    @classmethod
    def of(cls, rows: list[Row]) -> Minibatch:
        tokens = {row.group: 0 for row in rows}
        for row in rows:
            tokens[row.group] += len(row.response.new)
        counts = Denominators(sum(tokens.values()), max(len(rows), 1), LONGEST, max(len(tokens), 1))
        return cls(counts, sum(len(row.response.new) for row in rows if row.right), tokens)


def inputs_of_rows(rows: list[Row], minibatch: Minibatch) -> dict[str, Tensor]:
    """All that a micro-batch can have. The entropy is any function of the log-probs that bears a gradient."""
    inputs = packed([row.response for row in rows])
    inputs["rollout_log_probs"] = torch.tensor([value for row in rows for value in row.rollout], dtype=torch.float64)
    inputs["entropy"] = inputs["log_probs"].square()
    inputs["right"] = torch.tensor([row.right for row in rows], dtype=torch.bool)
    inputs["group_tokens"] = torch.tensor([minibatch.group_tokens[row.group] for row in rows], dtype=torch.float32)
    return inputs


def run(
    algorithm: Algorithm,
    rows: list[Row],
    minibatch: Minibatch,
    *,
    without: tuple[str, ...] = (),
    entropy_coef: float = 0.0,
) -> tuple[Objective, Tensor]:
    """The objective of one micro-batch, and its gradient for each of its tokens."""
    inputs = inputs_of_rows(rows, minibatch)
    objective = algorithm.objective(
        LossInputs(**inputs).replace(**dict.fromkeys(without)),
        minibatch.denominators,
        kl_coef=algorithm.kl.coef,
        entropy_coef=entropy_coef,
        right_tokens=minibatch.right_tokens,
    )
    (gradient,) = torch.autograd.grad(objective.loss, inputs["log_probs"], allow_unused=True)
    return objective, torch.zeros_like(inputs["log_probs"]) if gradient is None else gradient


def divergence_of(estimator: str, new: float, reference: float, old: float) -> float:
    d = new - reference
    if estimator == "k3_unbiased":
        return rho_of(new, old) * (math.exp(-d) - 1 + d)
    return {"1": d, "2": d * d / 2, "3": min(math.exp(-d) - 1 + d, 10.0)}[estimator[1]]


def weights_of(name: str, row: Row) -> list[float]:
    """Rollout corrections by their formulas, with their default bounds."""
    logs = [old - mu for old, mu in zip(row.response.old, row.rollout, strict=True)]
    product, mean = math.exp(math.fsum(logs)), math.exp(math.fsum(logs) / max(len(logs), 1))
    drift = math.fsum(mu - new for new, mu in zip(row.response.new, row.rollout, strict=True)) / max(len(logs), 1)
    weights = []
    for log in logs:
        r = math.exp(log)
        weights.append(
            {
                "none": 1.0,
                "bypass": 1.0,
                "token_mask": float(0.5 <= r <= 2.0),
                "sequence_icepop": product if product <= 3.0 else 0.0,
                "off_policy_mask": float(row.response.advantage >= 0 or drift <= 0.5),
                "token_tis": min(r, 2.0),
                "sequence_tis": min(product, 2.0),
                "icepop": r if 0.5 <= r <= 5.0 else 0.0,
                "sequence_mask": float(0.5 <= product <= 2.0),
                "geometric_mask": float(0.999 <= 1 / mean <= 1.001),
            }[name]
        )
    return weights


def geometric(weights: list[float]) -> list[float]:
    """The weight of a whole response, as GMPO has it."""
    mean = math.fsum(math.log(max(weight, 1e-10)) for weight in weights) / max(len(weights), 1)
    return [math.exp(mean)] * len(weights)


def objective_reference(rows: list[Row], section: Section, entropy_coef: float) -> tuple[float, dict[str, float]]:
    """aggregate(weight · policy loss + β KL − c entropy) + n · NLL of the right ones, in loops."""
    names = ("tokens", "policy_loss", "clip_low_tokens", "clip_high_tokens", "ratio_abs_dev", "kl", "entropy")
    sums = dict.fromkeys([*names, "mismatch_tokens", "mismatch_kl", "mismatch_k3", "mismatch_ratio"], 0.0)
    minibatch = Minibatch.of(rows)
    clips = {} if section.clip_high is None else {"clip_high": section.clip_high}
    behaviour = [row.rollout if section.correction == "bypass" else row.response.old for row in rows]
    responses = [row.response._replace(old=old) for row, old in zip(rows, behaviour, strict=True)]
    terms = REFERENCES[section.loss](responses, **clips, **section.options)
    totals, nll = [], 0.0
    for row, of_row, r in zip(rows, terms, responses, strict=True):
        total, weights = 0.0, weights_of(section.correction, row)
        weights = geometric(weights) if section.loss == "gmpo" else weights
        for new, old, trainer, reference, mu, term, weight in zip(
            r.new, r.old, row.response.old, r.reference, row.rollout, of_row, weights, strict=True
        ):
            divergence = divergence_of(section.kl_estimator, new, reference, old)
            total += weight * term.loss + section.kl_coef * divergence - entropy_coef * new * new
            nll -= new if row.right else 0.0
            sums["tokens"] += 1
            sums["policy_loss"] += weight * term.loss
            sums["clip_low_tokens"] += term.clipped_low
            sums["clip_high_tokens"] += term.clipped_high
            sums["ratio_abs_dev"] += abs(rho_of(new, old) - 1)
            sums["kl"] += divergence
            sums["entropy"] += new * new
            sums["mismatch_tokens"] += 1
            sums["mismatch_kl"] += mu - trainer
            sums["mismatch_k3"] += math.exp(trainer - mu) - 1 - (trainer - mu)
            sums["mismatch_ratio"] += math.exp(trainer - mu)
        totals.append(total)
    n = max(len(rows), 1)
    loss = {
        "token-mean": sum(totals) / max(sums["tokens"], 1.0),
        "seq-mean-token-sum": sum(totals) / n,
        "seq-mean-token-mean": sum(x / max(len(row.response.new), 1) for x, row in zip(totals, rows, strict=True)) / n,
        "seq-mean-token-sum-norm": sum(totals) / n / LONGEST,
        "group-mean-token-mean": sum(
            sum(x for x, row in zip(totals, rows, strict=True) if row.group == group) / max(tokens, 1)
            for group, tokens in minibatch.group_tokens.items()
        )
        / max(len(minibatch.group_tokens), 1),
    }
    return loss[section.aggregation] + section.nll_coef * nll / max(minibatch.right_tokens, 1), sums


def values_of(sums: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in sums.items()}


ragged = st.lists(st.integers(0, LONGEST), max_size=5)
seeds = st.integers(0, 2**32)
coefs = st.sampled_from([0.0, 0.1])
estimators = st.sampled_from(kl.names())
REJECTING = [name for name in correction.names() if Corrections.of(name).rejecting]
corrections = st.sampled_from(correction.names())


def fits(loss: str, name: str) -> bool:
    """True if the loss is compatible with the correction: rejection must not split pairs."""
    return loss != "dpo" or name not in REJECTING


def check_against_the_papers(rows: list[Row], section: Section, entropy_coef: float) -> None:
    objective, _ = run(build_algorithm(**section.model_dump()), rows, Minibatch.of(rows), entropy_coef=entropy_coef)
    loss, expected = objective_reference(rows, section, entropy_coef)
    assert objective.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
    sums = values_of(objective.sums)
    assert set(sums) >= set(expected)
    assert all(value.dtype == torch.float64 and value.shape == () for value in objective.sums.values())
    assert {name: sums[name] for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("aggregation_name", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
@few
@given(lengths=ragged, seed=seeds, kl_coef=coefs, entropy_coef=coefs, nll_coef=coefs, corrected=corrections)
def test_objective_equals_the_papers_with_every_loss_and_aggregation(
    loss: str,
    aggregation_name: str,
    lengths: list[int],
    seed: int,
    kl_coef: float,
    entropy_coef: float,
    nll_coef: float,
    corrected: str,
) -> None:
    assume(fits(loss, corrected))
    section = Section(
        loss=loss,
        aggregation=aggregation_name,
        select="pairs" if loss == "dpo" else "all",
        options=NEEDED.get(loss, {}),
        kl_coef=kl_coef,
        nll_coef=nll_coef,
        correction=corrected,
    )
    check_against_the_papers(rows_of(lengths, seed), section, entropy_coef)


@pytest.mark.parametrize("corrected", correction.names())
@pytest.mark.parametrize("estimator", kl.names())
@few
@given(lengths=ragged, seed=seeds, aggregation_name=st.sampled_from(AGGREGATIONS))
def test_objective_equals_the_papers_with_every_kl_and_correction(
    estimator: str, corrected: str, lengths: list[int], seed: int, aggregation_name: str
) -> None:
    section = Section(
        kl_coef=0.3, kl_estimator=estimator, correction=corrected, aggregation=aggregation_name, clip_high=0.28
    )
    check_against_the_papers(rows_of(lengths, seed), section, 0.01)


def trimmed(rows: list[Row], name: str) -> tuple[list[list[bool]], list[Row]]:
    """The tokens of each row that a rejection keeps, and the rows without the others; those that have lost all of
    their tokens are gone, but not those that never had any."""
    masks = [[weight > 0 for weight in weights_of(name, row)] for row in rows]
    remaining = []
    for row, mask in zip(rows, masks, strict=True):
        r = row.response

        def of(values: list[Any], mask: list[bool] = mask) -> list[Any]:
            return [value for value, keep in zip(values, mask, strict=True) if keep]

        shorter = r._replace(new=of(r.new), old=of(r.old), reference=of(r.reference), selected=of(r.selected))
        if any(mask) or not mask:
            remaining.append(Row(shorter, of(row.rollout), row.right, row.group))
    return masks, remaining


@pytest.mark.parametrize("name", REJECTING)
@pytest.mark.parametrize("loss", ["ppo", "gspo", "gmpo", "cispo", "clip_cov"])
@few
@given(lengths=ragged, seed=seeds, aggregation_name=st.sampled_from(AGGREGATIONS), parts=st.integers(1, 3))
def test_rejected_samples_leave_loss_kl_entropy_and_denominators(
    name: str, loss: str, lengths: list[int], seed: int, aggregation_name: str, parts: int
) -> None:
    """As if the rejected tokens had never been there: against the loops over what is left."""
    section = Section(loss=loss, aggregation=aggregation_name, kl_coef=0.2, nll_coef=0.1, correction=name)
    algorithm, rows = build_algorithm(**section.model_dump()), rows_of(lengths, seed)
    masks, remaining = trimmed(rows, name)
    inputs = inputs_of_rows(rows, Minibatch.of(rows))
    keep_mask = algorithm.keep_tokens(LossInputs(**inputs))
    assert keep_mask.tolist() == [flag for mask in masks for flag in mask]
    minibatch = Minibatch.of(remaining)
    loss_of_all, totals = 0.0, dict[str, float]()
    for at in range(parts):
        indices = list(range(at, len(rows), parts))
        part = [rows[index] for index in indices]
        columns = inputs_of_rows(part, Minibatch.of(part))
        columns["kept"] = torch.tensor([flag for index in indices for flag in masks[index]], dtype=torch.bool)
        tokens = [minibatch.group_tokens.get(row.group, 0) for row in part]
        columns["group_tokens"] = torch.tensor(tokens, dtype=torch.float32)
        objective = algorithm.objective(
            LossInputs(**columns),
            minibatch.denominators,
            kl_coef=0.2,
            entropy_coef=0.05,
            right_tokens=minibatch.right_tokens,
        )
        loss_of_all += objective.loss.item()
        for key, value in values_of(objective.sums).items():
            totals[key] = totals.get(key, 0.0) + value
    # What is left has weight 1, whatever its ratios: those of what is left alone are others.
    expected, sums = objective_reference(remaining, section.model_copy(update={"correction": "none"}), 0.05)
    assert loss_of_all == pytest.approx(expected, rel=1e-9, abs=1e-12)
    policy_sums = {key: value for key, value in sums.items() if not key.startswith("mismatch")}
    assert {key: totals[key] for key in policy_sums} == pytest.approx(policy_sums, rel=1e-9, abs=1e-9)
    assert totals["mismatch_tokens"] == sum(len(mask) for mask in masks)


def test_a_rejected_response_is_not_divided_by() -> None:
    """Of two responses of one token one is far from the engine: the mean is the other's, not half of it."""
    rows = [Row(Response([-1.0], [-1.0], [-1.0], 2.0, 0, [False]), [mu], False, 0) for mu in (-1.0, -9.0)]
    for aggregation_name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "group-mean-token-mean"):
        algorithm = build(correction="sequence_mask", aggregation=aggregation_name)
        _, remaining = trimmed(rows, "sequence_mask")
        inputs = inputs_of_rows(rows, Minibatch.of(rows)) | {"kept": torch.tensor([True, False])}
        inputs["group_tokens"] = torch.tensor([1.0, 1.0])
        assert algorithm.objective(
            LossInputs(**inputs), Minibatch.of(remaining).denominators
        ).loss.item() == pytest.approx(-2.0)


def test_a_minibatch_of_which_nothing_is_left_has_a_loss_of_zero() -> None:
    nothing = Denominators(tokens=0, sequences=0, max_length=LONGEST, groups=0)
    for aggregation_name in AGGREGATIONS:
        inputs = inputs_of_rows(SMOOTH, Minibatch.of(SMOOTH))
        inputs |= {"kept": torch.zeros(len(inputs["sequence"]), dtype=torch.bool)}
        objective = build(correction="token_mask", aggregation=aggregation_name, kl_coef=0.1).objective(
            LossInputs(**inputs), nothing, kl_coef=0.1, entropy_coef=0.1
        )
        assert objective.loss.item() == 0.0
        (gradient,) = torch.autograd.grad(objective.loss, inputs["log_probs"])
        assert not gradient.any()


def test_the_bypass_compares_with_the_engine_in_every_update() -> None:
    """PPO's clip holds π / μ: 1.5 is cut at 1.2, though the trainer's own policy has not moved."""
    rows = [Row(Response([-1.0], [-1.0], [-1.0], 2.0, 0, [False]), [-1.0 - math.log(1.5)], False, 0)]
    for without in ((), ("old_log_probs",)):
        objective, gradient = run(build(correction="bypass"), rows, Minibatch.of(rows), without=without)
        assert objective.loss.item() == pytest.approx(-2 * 1.2)
        assert gradient.tolist() == [0.0]
        assert objective.sums["clip_high_tokens"].item() == 1.0
        assert objective.sums["mismatch_ratio"].item() == pytest.approx(1.5)


def add_up(
    algorithm: Algorithm, rows: list[Row], ranks: list[list[list[int]]], entropy_coef: float = 0.0
) -> tuple[float, dict[str, float], dict[int, Tensor]]:
    """Loss, sums and gradients of a minibatch forwarded as ranks[rank][micro-batch] → rows."""
    minibatch = Minibatch.of(rows)
    loss, sums, gradients = 0.0, dict[str, float](), dict[int, Tensor]()
    for parts in ranks:
        for part in parts:
            micro_rows = [rows[index] for index in part]
            objective, gradient = run(algorithm, micro_rows, minibatch, entropy_coef=entropy_coef)
            loss += objective.loss.item()
            for name, value in values_of(objective.sums).items():
                sums[name] = sums.get(name, 0.0) + value
            gradients |= zip(part, gradient.split([len(row.response.new) for row in micro_rows]), strict=True)
    return loss, sums, gradients


@pytest.mark.parametrize("aggregation_name", AGGREGATIONS)
@pytest.mark.parametrize("loss", losses.names())
@few
@given(lengths=ragged, seed=seeds, parts=st.integers(1, 3), corrected=corrections)
def test_any_split_over_micro_batches_and_two_ranks_adds_up_to_the_whole(
    loss: str, aggregation_name: str, lengths: list[int], seed: int, parts: int, corrected: str
) -> None:
    assume(fits(loss, corrected))
    algorithm = build(loss=loss, aggregation=aggregation_name, kl_coef=0.1, nll_coef=0.1, correction=corrected)
    rows = rows_of(lengths, seed)
    single = add_up(algorithm, rows, [[list(range(len(rows)))]], 0.01)

    # Pairs stay together. A part may be empty: ranks run the same number of micro-batches, with samples left or not.
    pairs = list(range(len(lengths)))
    random.Random(seed).shuffle(pairs)
    split = [[i for pair in pairs[at :: 2 * parts] for i in (2 * pair, 2 * pair + 1)] for at in range(2 * parts)]
    two = add_up(algorithm, rows, [split[:parts], split[parts:]], 0.01)
    assert two[0] == pytest.approx(single[0], rel=1e-9, abs=1e-12)
    assert two[1] == pytest.approx(single[1], rel=1e-9, abs=1e-12)
    assert set(two[2]) == set(single[2])
    for index, gradient in single[2].items():
        torch.testing.assert_close(two[2][index], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", losses.names())
@few
@given(lengths=ragged, seed=seeds)
def test_zero_advantage_samples_are_skipped_only_if_the_algorithm_allows(
    loss: str, lengths: list[int], seed: int
) -> None:
    algorithm = build(loss=loss, aggregation="group-mean-token-mean")
    rows = rows_of([3, *lengths, 3], seed, zeros=0.5)
    rows[0].response = rows[0].response._replace(advantage=0.0)
    rows[1].response = rows[1].response._replace(advantage=0.0)
    active = [index for index, row in enumerate(rows) if row.response.advantage != 0.0]
    _, _, everything = add_up(algorithm, rows, [[list(range(len(rows)))]])
    _, _, rest = add_up(algorithm, rows, [[active]])
    for index in active:
        torch.testing.assert_close(rest[index], everything[index], rtol=1e-12, atol=1e-12)
    silent = not any(bool(everything[index].any()) for index in set(range(len(rows))) - set(active))
    if algorithm.skips_zero_advantages:
        assert silent
    elif algorithm.token_selector is None:
        assert not silent


def test_what_else_has_a_gradient_keeps_every_sample() -> None:
    assert build().skips_zero_advantages
    for changes in (
        {"kl_coef": 0.1},
        {"entropy_coef": 0.01},
        {"entropy_target": 0.2},
        {"nll_coef": 0.1},
        {"kl_coef": 0.1, "kl_in": "reward"},
        {"advantage": "gae"},
        {"correction": "token_mask"},  # so does a rejection, which takes some of them out of the denominators
        {"loss": "clip_cov"},  # the means over all tokens count those of the samples without a gradient
    ):
        assert not build(**changes).skips_zero_advantages, changes


SMOOTH = rows_of([3, 5], seed=5, zeros=0.0)


@pytest.mark.parametrize("aggregation_name", AGGREGATIONS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_objective_gradient_is_that_of_its_value(aggregation_name: str, estimator: str) -> None:
    algorithm = build(kl_coef=0.3, kl_estimator=estimator, aggregation=aggregation_name, dual_clip=1.5, nll_coef=0.2)
    minibatch = Minibatch.of(SMOOTH)
    inputs = inputs_of_rows(SMOOTH, minibatch)

    def loss(log_probs: Tensor) -> Tensor:
        changed = inputs | {"log_probs": log_probs, "entropy": log_probs.square()}
        return algorithm.objective(
            LossInputs(**changed),
            minibatch.denominators,
            kl_coef=0.3,
            entropy_coef=0.05,
            right_tokens=minibatch.right_tokens,
        ).loss

    assert torch.autograd.gradcheck(loss, inputs["log_probs"])


@pytest.mark.parametrize("estimator", ["k1+", "k3+"])
def test_straight_through_kl_has_its_own_value_and_the_gradient_of_k2(estimator: str) -> None:
    minibatch = Minibatch.of(SMOOTH)
    plus, gradient = run(build(kl_coef=0.3, kl_estimator=estimator), SMOOTH, minibatch)
    namesake, _ = run(build(kl_coef=0.3, kl_estimator=estimator[:2]), SMOOTH, minibatch)
    _, expected = run(build(kl_coef=0.3, kl_estimator="k2"), SMOOTH, minibatch)
    assert plus.loss.item() == pytest.approx(namesake.loss.item(), rel=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_kl_in_the_reward_is_measured_but_is_no_term_of_the_loss() -> None:
    minibatch = Minibatch.of(SMOOTH)
    rewarded, gradient = run(build(kl_coef=0.3, kl_in="reward"), SMOOTH, minibatch)
    without, expected = run(build(), SMOOTH, minibatch)
    assert rewarded.loss.item() == without.loss.item()
    assert torch.equal(gradient, expected)
    assert rewarded.sums["kl"].item() == without.sums["kl"].item() > 0


def test_without_old_log_probs_the_gradient_is_the_plain_policy_gradient() -> None:
    new = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    inputs = {
        "log_probs": new,
        "advantages": torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64),
        "sequence": torch.tensor([0, 0, 1]),
        "lengths": torch.tensor([2, 1]),
    }
    objective = build().objective(LossInputs(**inputs), Denominators(tokens=6, sequences=3, max_length=9))
    objective.loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-2 / 6, -2 / 6, 1 / 6])
    assert objective.sums["ratio_abs_dev"].item() == 0.0
    assert not any(value.requires_grad for value in objective.sums.values())


def test_without_old_log_probs_the_correction_weighs_the_current_policy() -> None:
    rows = [Row(Response([-1.0], [-1.0], [-1.0], 2.0, 0, [False]), [-1.0 - math.log(1.5)], False, 0)]
    objective, gradient = run(build(), rows, Minibatch.of(rows), without=("old_log_probs",))
    assert objective.sums["policy_loss"].item() == pytest.approx(-2 * 1.5)  # r = 1.5, without a gradient of its own
    assert gradient.tolist() == pytest.approx([-2 * 1.5])


@pytest.mark.parametrize("aggregation_name", AGGREGATIONS)
@pytest.mark.parametrize("loss", losses.names())
def test_an_empty_micro_batch_has_a_zero_loss_with_gradient_and_all_sums(loss: str, aggregation_name: str) -> None:
    algorithm = build(loss=loss, aggregation=aggregation_name, kl_coef=0.1, nll_coef=0.1)
    minibatch = Minibatch.of(SMOOTH)
    full, _ = run(algorithm, SMOOTH, minibatch)
    for rows in ([], rows_of([0, 0], seed=0)):
        minibatch = Minibatch.of(SMOOTH + rows)
        empty, gradient = run(algorithm, rows, minibatch)
        assert empty.loss.item() == 0.0
        assert empty.loss.requires_grad
        assert gradient.shape == (0,)
        assert values_of(empty.sums) == dict.fromkeys(full.sums, 0.0)


MISMATCH = {f"mismatch_{name}" for name in ("tokens", "kl", "k3", "ratio", "ratio_squared", "outliers", "corrected")}


@pytest.mark.parametrize(
    ("without", "gone"),
    [
        ("reference_log_probs", {"kl"}),
        ("entropy", {"entropy"}),
        ("rollout_log_probs", MISMATCH),
    ],
)
def test_sums_tell_of_what_is_given_alone(without: str, gone: set[str]) -> None:
    minibatch = Minibatch.of(SMOOTH)
    full, _ = run(build(), SMOOTH, minibatch)
    less, _ = run(build(), SMOOTH, minibatch, without=(without,))
    assert set(full.sums) - set(less.sums) == gone
    for name in less.sums.keys() - {"policy_loss"}:
        assert less.sums[name].item() == full.sums[name].item()
