"""The rollout corrections and the mismatch metrics against plain-Python references."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.algorithms import correction
from rlcli.algorithms.correction.base import Corrections
from rlcli.algorithms.correction.mismatch import mismatch_metrics, mismatch_sums
from rlcli.algorithms.function_registry import options_of
from rlcli.algorithms.inputs import LossInputs
from rlcli.errors import UnknownName

relaxed = settings(deadline=None, max_examples=60)  # the first call of a torch operation is slow
WEIGHTS = ["bypass", "icepop", "none", "sequence_icepop", "sequence_tis", "token_tis"]
REJECTING = ["geometric_mask", "sequence_mask", "token_mask"]
NAMES = sorted([*WEIGHTS, *REJECTING, "off_policy_mask"])
Response = list[tuple[float, float]]  # (log π, log μ) of each token
near = st.floats(-6.0, 0.0).flatmap(lambda p: st.tuples(st.just(p), st.floats(-0.9, 0.9).map(lambda d: p + d)))
far = st.tuples(st.floats(-60.0, 0.0), st.floats(-60.0, 0.0) | st.just(-math.inf))
batches = st.lists(st.lists(near | far, max_size=5), max_size=5)


def clamp(value: float) -> float:
    return min(20.0, max(-20.0, value))


def references(name: str, response: Response, cap: float, low: float, high: float) -> list[float]:
    logs = [clamp(new - engine) for new, engine in response]
    ratios = [math.exp(log) for log in logs]
    if name in ("none", "bypass"):
        return [1.0] * len(response)
    if name == "token_tis":
        return [min(ratio, cap) for ratio in ratios]
    if name == "icepop":
        return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]
    if name == "token_mask":
        return [1.0 if low <= ratio <= high else 0.0 for ratio in ratios]
    if not response:
        return []
    if name == "off_policy_mask":  # every advantage is −1 here
        return [0.0 if -math.fsum(logs) / len(logs) > 0.5 else 1.0] * len(response)
    product = math.exp(clamp(math.fsum(logs)))
    if name == "sequence_icepop":
        return [product if low <= product <= high else 0.0] * len(response)
    if name == "sequence_tis":
        return [min(product, cap)] * len(response)
    judged = product if name == "sequence_mask" else math.exp(math.fsum(logs) / len(response))
    return [1.0 if low <= judged <= high else 0.0] * len(response)


def inputs(batch: list[Response], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    tokens = [token for response in batch for token in response]
    lengths = [len(response) for response in batch]
    log_probs = torch.tensor([new for new, _ in tokens], dtype=dtype)
    return {
        "old_log_probs": log_probs,
        "log_probs": log_probs,
        "advantages": -torch.ones_like(log_probs),
        "rollout_log_probs": torch.tensor([engine for _, engine in tokens], dtype=dtype),
        "sequence": torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)], dtype=torch.int64),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
    }


def weigh(name: str, columns: dict[str, Any], **options: float) -> Tensor:
    return correction.part(name, options)(LossInputs(**columns))


def test_every_correction_is_offered_and_proven_here() -> None:
    assert correction.names() == NAMES


def test_the_defaults_are_those_of_the_field() -> None:
    defaults = {name: tuple(options_of(correction.get(name)).values()) for name in NAMES}
    assert defaults == {
        "bypass": (),
        "geometric_mask": (1 / 1.001, 1 / 0.999),  # verl's bounds are those of μ / π
        "icepop": (0.5, 5.0),
        "none": (),
        "off_policy_mask": (0.5,),
        "sequence_icepop": (0.0, 3.0),
        "sequence_mask": (0.5, 2.0),
        "sequence_tis": (2.0,),
        "token_mask": (0.5, 2.0),
        "token_tis": (2.0,),
    }


@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(
    batch=batches,
    cap=st.sampled_from([1.0, 2.0, 7.5]),
    low=st.sampled_from([0.0, 0.3, 0.9]),
    high=st.sampled_from([1.1, 5.0, 1e12]),
)
def test_the_weights_equal_the_reference(name: str, batch: list[Response], cap: float, low: float, high: float) -> None:
    options = {"correction_cap": cap, "correction_low": low, "correction_high": high}
    got = weigh(name, inputs(batch), **options)
    expected = [weight for response in batch for weight in references(name, response, cap, low, high)]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(batch=batches, data=st.data())
def test_a_response_is_judged_alone_wherever_it_lies(name: str, batch: list[Response], data: st.DataObject) -> None:
    by_response = weigh(name, inputs(batch)).split([len(response) for response in batch])
    order = data.draw(st.permutations(range(len(batch))))
    moved = weigh(name, inputs([batch[i] for i in order])).split([len(batch[i]) for i in order])
    for i, weights in zip(order, moved, strict=True):
        torch.testing.assert_close(weights, by_response[i], rtol=1e-12, atol=0.0)
        torch.testing.assert_close(weigh(name, inputs([batch[i]])), by_response[i], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_are_finite_detached_and_of_the_dtype_of_the_log_probs(name: str, dtype: torch.dtype) -> None:
    columns = inputs([[(0.0, -math.inf), (-1e30, 0.0)], [], [(0.0, -math.inf)] * 3, [(-1e4, -1.0)]], dtype)
    columns["old_log_probs"].requires_grad_()
    columns["log_probs"].requires_grad_()
    weights = weigh(name, columns, correction_cap=math.inf, correction_low=0.0, correction_high=math.inf)
    assert torch.isfinite(weights).all()
    assert not weights.requires_grad
    assert weights.dtype == dtype
    assert weights.shape == columns["log_probs"].shape


@pytest.mark.parametrize("name", ["icepop", "sequence_icepop", *REJECTING])
def test_the_bounds_themselves_are_inside(name: str) -> None:
    columns = inputs([[(-1.0, -1.0)]])
    assert weigh(name, columns, correction_low=1.0, correction_high=1.0).tolist() == [1.0]


@pytest.mark.parametrize("length", [1, 2, 50])
def test_the_geometric_mean_judges_all_lengths_alike(length: int) -> None:
    slight, larger = ([(-1.0, -1.0 - math.log(ratio))] * length for ratio in (1.0008, 1.0012))
    assert weigh("geometric_mask", inputs([slight, larger])).tolist() == [1.0] * length + [0.0] * length


def test_with_equal_log_probs_nothing_is_corrected() -> None:
    columns = inputs([[(-1.0, -1.0)] * 3, [(-0.1, -0.1)]])
    for name in NAMES:
        assert weigh(name, columns).tolist() == [1.0] * 4


BOUNDS = {"correction_low": 0.25, "correction_high": 3.0}  # far from each other's inverse


@pytest.mark.parametrize("name", ["icepop", "sequence_icepop", *REJECTING])
def test_bounds_are_those_of_trainer_over_engine(name: str) -> None:
    """π / μ of 0.3 and 2.9 are inside, those of 1 / 0.3 and 1 / 2.9 are not, or would be, were it μ / π."""
    accepted = [bool(weigh(name, inputs([[(-9.0, -9.0 - math.log(r))]]), **BOUNDS)) for r in (0.3, 2.9, 1 / 0.3, 0.2)]
    assert accepted == [True, True, False, False]


def verl_mask(mode: str, response: Response, lower: float, upper: float) -> list[bool]:
    """The tokens that verl 0.9.1 keeps for `rollout_rs: mode` and `rollout_rs_threshold: lower_upper`, by its
    documentation: the k1 of a token is −log(π / μ), and it, its sum or its mean over the response must lie between
    log lower and log upper."""
    k1 = [-clamp(new - engine) for new, engine in response]
    judged = {"token_k1": k1, "seq_sum_k1": [math.fsum(k1)] * len(k1)}
    judged["seq_mean_k1"] = [math.fsum(k1) / max(len(k1), 1)] * len(k1)
    return [math.log(lower) <= value <= math.log(upper) for value in judged[mode]]


@pytest.mark.parametrize(
    ("name", "mode"), [("token_mask", "token_k1"), ("sequence_mask", "seq_sum_k1"), ("geometric_mask", "seq_mean_k1")]
)
@relaxed
@given(batch=st.lists(st.lists(near, max_size=5), max_size=5), lower=st.floats(0.1, 0.9), upper=st.floats(1.1, 9.0))
def test_rejections_are_verls_with_its_bounds_inverted(
    name: str, mode: str, batch: list[Response], lower: float, upper: float
) -> None:
    weights = weigh(name, inputs(batch), correction_low=1 / upper, correction_high=1 / lower).tolist()
    assert [weight == 1.0 for weight in weights] == [
        keep for response in batch for keep in verl_mask(mode, response, lower, upper)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_only_rejections_take_tokens_out(name: str) -> None:
    assert bool(Corrections.of(name).rejecting) == (name in REJECTING)


def test_several_corrections_multiply_and_reject_what_either_rejects() -> None:
    batch = [[(-1.0, -1.0 - math.log(1.5)), (-1.0, -1.0 - math.log(0.2))], [(-1.0, -1.0)]]
    joined = Corrections.of("sequence_tis*token_mask * geometric_mask")
    assert joined.weights(LossInputs(**inputs(batch))).tolist() == [0.0, 0.0, 1.0]
    assert joined.kept(LossInputs(**inputs(batch))).tolist() == [False, False, True]
    joined = Corrections.of("sequence_tis * token_mask")
    assert joined.weights(LossInputs(**inputs(batch))).tolist() == pytest.approx([0.3, 0.0, 1.0])
    assert joined.kept(LossInputs(**inputs(batch))).tolist() == [True, False, True]


def test_the_off_policy_mask_spares_advantages_that_are_not_negative() -> None:
    columns = inputs([[(-3.0, -1.0)] * 2, [(-3.0, -1.0)] * 2, [(-1.2, -1.0)]])
    columns["old_log_probs"] = columns["old_log_probs"] + 9.0  # of the start of the step: it does not count
    columns["advantages"] = torch.tensor([-1.0, 0.0, 0.5, -1e-9, -2.0], dtype=torch.float64)
    assert weigh("off_policy_mask", columns).tolist() == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert weigh("off_policy_mask", columns, off_policy_threshold=2.5).tolist() == [1.0] * 5


# --- metrics ----------------------------------------------------------------------------------------------------------


def totals(batch: list[Response], name: str, dtype: torch.dtype = torch.float64, **options: float) -> dict[str, float]:
    columns = inputs(batch, dtype)
    pair = columns["old_log_probs"], columns["rollout_log_probs"]
    weights = weigh(name, columns, **options)
    sums = mismatch_sums(*pair, weights, columns["sequence"], columns["lengths"])
    assert all(total.dtype == torch.float64 and total.shape == () for total in sums.values())
    return {key: total.item() for key, total in sums.items()}


@relaxed
@given(batch=batches.filter(any))
def test_the_metrics_equal_the_reference(batch: list[Response]) -> None:
    logs = [clamp(new - engine) for response in batch for new, engine in response]
    ratios = [math.exp(log) for log in logs]
    got = mismatch_metrics(totals(batch, "none"))
    assert got == pytest.approx(
        {
            "mismatch/kl": -math.fsum(logs) / len(logs),
            "mismatch/k3": math.fsum(math.expm1(log) - log for log in logs) / len(logs),
            "mismatch/ess": math.fsum(ratios) ** 2 / (len(logs) * math.fsum(ratio**2 for ratio in ratios)),
            "mismatch/outliers": sum(not 0.5 <= ratio <= 2 for ratio in ratios) / len(ratios),
            "mismatch/corrected": 0.0,
        },
        rel=1e-9,
        abs=1e-12,
    )
    assert 0 < got["mismatch/ess"] <= 1 + 1e-12
    assert got["mismatch/k3"] >= 0


@relaxed
@given(batch=batches, cut=st.integers(0, 5))
def test_sums_of_micro_batches_add_up_to_those_of_the_whole(batch: list[Response], cut: int) -> None:
    total, first, second = (totals(part, "token_tis") for part in (batch, batch[:cut], batch[cut:]))
    assert {key: first[key] + second[key] for key in total} == pytest.approx(total, rel=1e-12, abs=1e-12)


CORRECTED = {  # r of the four tokens: 1, 2.9 | 0.2, 1.0002; Π: 2.9 | 0.20004; G: 1.7 | 0.447
    "none": 0.0,
    "bypass": 0.0,
    "token_mask": 0.5,
    "sequence_icepop": 0.0,
    "off_policy_mask": 0.5,
    "token_tis": 0.25,
    "sequence_tis": 0.5,
    "icepop": 0.25,
    "sequence_mask": 1.0,
    "geometric_mask": 1.0,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_corrected_counts_the_tokens_whose_weight_was_cut_or_zeroed(name: str, dtype: torch.dtype) -> None:
    batch = [[(-1.0, -1.0), (-1.0, -1.0 - math.log(2.9))], [(-3.0, -3.0 - math.log(0.2)), (-1.0, -1.0002)]]
    got = mismatch_metrics(totals(batch, name, dtype))
    assert got["mismatch/corrected"] == CORRECTED[name]
    bounds = {"correction_cap": math.inf, "correction_low": 0.0, "correction_high": math.inf}
    free = totals(batch, name, dtype, **bounds, off_policy_threshold=math.inf)
    assert free["mismatch_corrected"] == 0.0


def test_a_slight_cut_counts_too() -> None:
    assert totals([[(-1.0, -1.0 - math.log(2.0002))]], "token_tis")["mismatch_corrected"] == 1.0


def test_the_kl_is_that_of_engine_to_trainer() -> None:
    """Tokens as often as the engine draws them: 3/4 and 1/4, where the trainer has 1/2 and 1/2."""
    batch = [[(math.log(0.5), math.log(0.75))] * 3, [(math.log(0.5), math.log(0.25))]]
    exact = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    got = mismatch_metrics(totals(batch, "none"))
    assert got["mismatch/kl"] == pytest.approx(exact, rel=1e-12)
    assert got["mismatch/k3"] == pytest.approx(exact, rel=1e-12)  # the ratios average to exactly 1


def test_a_step_without_tokens_has_no_mismatch() -> None:
    assert mismatch_metrics(totals([[], []], "token_tis")) == {
        "mismatch/kl": 0.0,
        "mismatch/k3": 0.0,
        "mismatch/ess": 1.0,
        "mismatch/outliers": 0.0,
        "mismatch/corrected": 0.0,
    }


def test_an_unknown_correction_is_refused_with_the_near_ones() -> None:
    with pytest.raises(UnknownName, match=r"'token_is'.*token_tis"):
        correction.get("token_is")
