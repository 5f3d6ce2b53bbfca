"""The statistics of the log-prob check: against plain loops, on noise alone, and with planted faults."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence

import numpy as np
import pytest

from rlcli.algorithms.correction.log_prob_check import (
    CLIP,
    COLUMNS,
    NEGLIGIBLE,
    SAMPLE,
    SPREAD,
    TOKEN,
    LogProbComparison,
    Moments,
    deviations,
    joined,
    mean_of,
    noise_of,
    position_of,
    sample_table,
    slope_of,
    statistics,
    worst_sample,
)

VOCABULARY = 200
DTYPE_NOISE = {"float32": 1e-6, "float16": 0.006, "bfloat16": 0.06}
"""Standard deviation of the noise on the logits of either side."""
TRAINER = 1.15
"""ν of the trainer alone ÷ ν of two sound implementations, as measured."""
NOTHING = Moments.of(joined([]))


class Simulated:
    """Responses sampled from an engine's softmax, and the log-probs of both sides, whose logits have noise each.

    Contexts differ in how sure the policy is. Noise has heavy tails, and samples differ in its scale.
    """

    def __init__(self, seed: int, noise: float, *, samples: int = 64, tokens: int = 32) -> None:
        self.random = random = np.random.default_rng(seed)
        self.lengths = random.integers(tokens // 2, tokens + tokens // 2, samples)
        self.total = int(self.lengths.sum())
        self.sample = np.repeat(np.arange(samples), self.lengths)
        self.position = np.concatenate([np.arange(length) for length in self.lengths])
        sharp = random.uniform(0.2, 5.0, (self.total, 1))
        self.logits = sharp * random.standard_normal((self.total, VOCABULARY))
        self.scale = noise * np.exp(0.15 * random.standard_normal(samples))[self.sample][:, None]
        self.engine = _log_softmax(self.noisy(self.logits))
        gumbel = random.gumbel(size=self.engine.shape)
        self.sampled = (self.engine + gumbel).argmax(axis=1)

    def noisy(self, logits: np.ndarray) -> np.ndarray:
        noise = self.random.standard_t(5, logits.shape) / math.sqrt(5 / 3)
        return logits + self.scale * noise

    def of(self, log_probs: np.ndarray) -> np.ndarray:
        picked: np.ndarray = log_probs[np.arange(self.total), self.sampled]
        return picked

    def table(self, trainer: np.ndarray | None = None, *, sampled: bool = True) -> np.ndarray:
        """trainer: the logits that the trainer computes, before its noise."""
        mine = self.of(_log_softmax(self.noisy(self.logits if trainer is None else trainer)))
        return sample_table(mine, self.of(self.engine), self.lengths, sampled=sampled)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probs: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return log_probs


def failed(tables: Sequence[np.ndarray], trainer: Moments) -> list[str]:
    """The statistics that fail after these steps. trainer: moments of the trainer alone."""
    moments = Moments.of(joined([]))
    for table in tables:
        moments = moments.scaled(0.8) + Moments.of(table)
    return [s.name for s in statistics(moments, LogProbComparison.of(tables[-1]), trainer) if not s.holds]


def of_trainer(noise: float, seed: int = 99) -> Moments:
    """Of the trainer alone, at this noise of the logits, from 16 samples."""
    return Moments.of(Simulated(seed, TRAINER * noise, samples=16).table(sampled=False))


@pytest.fixture(scope="module")
def known() -> dict[str, Moments]:
    return {dtype: of_trainer(noise) for dtype, noise in DTYPE_NOISE.items()}


@pytest.mark.parametrize("sampled", [True, False])
def test_the_table_equals_plain_loops(sampled: bool) -> None:
    random = np.random.default_rng(0)
    lengths = np.array([3, 0, 5, 1])
    pi, mu = -random.exponential(2.0, 9), -random.exponential(2.0, 9)
    table, start = sample_table(pi, mu, lengths, sampled=sampled), 0
    assert table.shape == (3, len(COLUMNS)), "a sample without tokens has no row"
    for row, length in zip(table, [3, 5, 1], strict=True):
        sums = dict.fromkeys(COLUMNS, 0.0)
        for position in range(length):
            p, m = float(pi[start + position]), float(mu[start + position])
            delta, x = p - m, (p + m) / 2
            clipped = max(-CLIP, min(CLIP, delta))
            d = clipped * math.exp(clipped / 2) if sampled else clipped
            e, late = 1 - math.exp(x), position >= 1.5  # half of the mean of 3, 5 and 1
            terms = {"tokens": 1, "x": x, "xx": x * x, "d": d, "xd": x * d, "a": abs(delta), "e": e, "ee": e * e}
            terms |= {"late_a": abs(delta) * late, "late_e": e * late, "k3": math.exp(delta) - 1 - delta}
            for name, term in terms.items():
                sums[name] += term
            sums["largest"] = max(sums["largest"], abs(delta))
        start += length
        np.testing.assert_allclose(row, list(sums.values()), rtol=1e-12)


def test_the_estimates_equal_plain_loops() -> None:
    """Also their standard errors: the root of the sum of squares of each sample's influence, from differences."""
    table = Simulated(1, 0.06, samples=12).table()
    moments = Moments.of(table)

    def estimates(weights: np.ndarray) -> list[float]:
        sums = dict(zip(COLUMNS, (weights[:, None] * table).sum(axis=0).tolist(), strict=True))
        n, early = sums["tokens"], (sums["a"] - sums["late_a"]) / (sums["e"] - sums["late_e"])
        covariance = sums["xd"] / n - sums["x"] / n * sums["d"] / n
        slope = covariance / (sums["xx"] / n - (sums["x"] / n) ** 2)
        return [sums["d"] / n, slope, sums["a"] / sums["e"], sums["late_a"] / sums["late_e"] - early]

    expected, from_moments = (
        estimates(np.ones(12)),
        [mean_of(moments), slope_of(moments), noise_of(moments), position_of(moments)],
    )
    squares, step = np.zeros(4), 1e-6
    for sample in range(12):
        up, down = np.ones(12), np.ones(12)
        up[sample], down[sample] = 1 + step, 1 - step
        squares += ((np.array(estimates(up)) - np.array(estimates(down))) / (2 * step)) ** 2
    np.testing.assert_allclose([estimate.value for estimate in from_moments], expected, rtol=1e-9)
    np.testing.assert_allclose([estimate.error for estimate in from_moments], np.sqrt(squares * 12 / 11), rtol=1e-5)


def test_sums_of_steps_are_those_of_their_samples() -> None:
    first, second = Simulated(1, 0.06).table(), Simulated(2, 0.06).table()
    summed = Moments.of(first) + Moments.of(second)
    together = Moments.of(joined([first, second]))
    np.testing.assert_allclose(summed.sums, together.sums)
    np.testing.assert_allclose(summed.products, together.products)
    assert summed.samples == together.samples == 128
    halved = Moments.of(first).scaled(0.5)
    assert halved.samples == 64, "a common weight changes no estimate"
    assert slope_of(halved).error == pytest.approx(slope_of(Moments.of(first)).error, rel=1e-9)
    assert (Moments.of(first).scaled(0.5) + Moments.of(second)).samples == pytest.approx(96**2 / 80)
    restored = Moments.restored(json.loads(json.dumps(summed.state())))
    assert restored.products.tolist() == summed.products.tolist(), "not a bit is lost in a checkpoint"
    assert (restored.weights, restored.squares) == (summed.weights, summed.squares)


def test_the_worst_sample_equals_a_plain_loop() -> None:
    table = Simulated(3, 0.06).table()
    largest = 0.0
    for row in table:
        sums = dict(zip(COLUMNS, row.tolist(), strict=True))
        largest = max(largest, sums["a"] / (SAMPLE * sums["e"] + SPREAD * math.sqrt(sums["ee"]) + TOKEN))
    assert worst_sample(table) == pytest.approx(largest, rel=1e-12)
    assert worst_sample(joined([])) == 0.0


def test_few_samples_need_more_standard_errors() -> None:
    """Against the quantiles of Student's distribution at 1 − 1e-9 (tables to five digits)."""
    assert deviations(1e12) == pytest.approx(6.0)
    assert deviations(101) == pytest.approx(6.61, abs=0.03)
    assert deviations(31) == pytest.approx(8.41, rel=0.03)
    assert deviations(9) > 15


def test_estimates_without_tokens_or_spread_say_nothing() -> None:
    nothing = Moments.of(joined([]))
    assert [s.name for s in statistics(nothing, LogProbComparison.of(joined([])), NOTHING)] == ["nonfinite"]
    assert noise_of(nothing).error == position_of(nothing).error == math.inf
    constant = Moments.of(sample_table(np.full(20, -1.0), np.full(20, -1.0), np.full(10, 2), sampled=True))
    assert slope_of(constant).error == math.inf
    assert [s.name for s in statistics(constant, LogProbComparison.of(joined([])), NOTHING) if not s.holds] == []


def test_a_comparison_survives_its_way_to_the_controller() -> None:
    table = Simulated(0, 0.06, samples=32).table()
    sent, received = LogProbComparison.of(table), pickle.loads(pickle.dumps(LogProbComparison.of(table)))
    np.testing.assert_array_equal(received.moments.sums, sent.moments.sums)
    np.testing.assert_array_equal(received.moments.products, sent.moments.products)
    np.testing.assert_array_equal(sent.moments.products, sent.moments.products.T)
    assert (received.moments.samples, received.worst_sample, received.largest) == (32, sent.worst_sample, sent.largest)


def test_log_probs_that_are_no_numbers_fail() -> None:
    for value in (math.nan, math.inf, -math.inf):
        table = sample_table(np.array([-1.0, -2.0]), np.array([-1.0, value]), np.array([2]), sampled=True)
        assert failed([table], NOTHING) == ["nonfinite"]
        assert np.isfinite(table[:, :-1]).all(), "the sums of later steps stay finite"


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPE_NOISE)
def test_rounding_alone_never_fails(dtype: str, known: dict[str, Moments]) -> None:
    """100 steps of 32 samples, each with the sums of the steps before it."""
    moments, wrong = Moments.of(joined([])), []
    for step in range(100):
        table = Simulated(step, DTYPE_NOISE[dtype], samples=32).table()
        moments = moments.scaled(0.8) + Moments.of(table)
        # Measured anew every ten steps, each time from few samples.
        alone = known[dtype] if step % 10 else of_trainer(DTYPE_NOISE[dtype], 1000 + step)
        wrong += [s.name for s in statistics(moments, LogProbComparison.of(table), alone) if not s.holds]
    assert wrong == []


@pytest.mark.long
def test_standardised_estimates_have_the_errors_that_they_state() -> None:
    """Over many steps of noise alone, estimate ÷ error has mean 0 and variance 1: so the bound's rate is that of
    Student's distribution, beyond 6 standard deviations of a normal variable."""
    ratios = []
    for seed in range(150):
        moments = Moments.of(Simulated(seed, 0.06, samples=32, tokens=16).table())
        ratios.append([estimate.value / estimate.error for estimate in (mean_of(moments), slope_of(moments))])
    means, deviation = np.mean(ratios, axis=0), np.std(ratios, axis=0)
    assert (np.abs(means) < 4 / math.sqrt(150)).all()
    assert (np.abs(deviation - 1) < 0.25).all()
    assert np.abs(ratios).max() < 4.5


@pytest.mark.long
def test_sampled_tokens_have_no_bias_where_plain_differences_have() -> None:
    """E[Δ] is −KL of what was sampled from; d has mean 0."""
    moments = [Moments.of(Simulated(seed, 0.3, samples=128).table()) for seed in range(10)]
    kl = sum(part.total("k3") for part in moments) / sum(part.total("tokens") for part in moments)
    together = moments[0]
    for part in moments[1:]:
        together += part
    assert kl > 20 * together.total("tokens") ** -0.5 * 0.05, "a bias that would be found"
    assert abs(mean_of(together).value) < 4 * mean_of(together).error


FAULTS = {
    "logits scaled by 1.02": "slope",
    "temperature of 0.9": "slope",
    "top-p on one side": "mean",
    "noise twice as large": "noise",
    "noise that grows with the position": "position",
    "one sample in a hundred differs": "worst_sample",
}


def planted(fault: str, seed: int) -> np.ndarray:
    simulated = Simulated(seed, DTYPE_NOISE["bfloat16"], samples=128)
    logits, random = simulated.logits, simulated.random
    if fault == "logits scaled by 1.02":
        return simulated.table(1.02 * logits)
    if fault == "temperature of 0.9":
        return simulated.table(logits / 0.9)
    if fault == "top-p on one side":
        cut = logits - 10.0 * (logits < np.quantile(logits, 0.2, axis=1, keepdims=True))
        return simulated.table(cut, sampled=False)
    if fault == "noise twice as large":
        return simulated.table(logits + 2.5 * simulated.scale * random.standard_normal(logits.shape))
    if fault == "noise that grows with the position":
        growth = simulated.position[:, None] / 16
        return simulated.table(logits + 2.5 * growth * simulated.scale * random.standard_normal(logits.shape))
    other = np.isin(simulated.sample, [40])[:, None]
    return simulated.table(logits + 6.0 * other * simulated.scale * random.standard_normal(logits.shape))


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_within_three_steps(fault: str, known: dict[str, Moments]) -> None:
    """In bfloat16, 128 samples of 32 tokens a step, by the statistic that is meant for it."""
    for first in (0, 10, 20):
        tables = [planted(fault, first + step) for step in range(3)]
        assert FAULTS[fault] in {name for end in (1, 2, 3) for name in failed(tables[:end], known["bfloat16"])}


def test_a_gross_fault_is_found_in_the_first_step_from_few_samples(known: dict[str, Moments]) -> None:
    """Its own variance makes every standard error large."""
    simulated = Simulated(0, DTYPE_NOISE["float32"], samples=16, tokens=8)
    assert "noise" in failed([simulated.table(1.02 * simulated.logits)], known["float32"])
    simulated = Simulated(1, DTYPE_NOISE["bfloat16"], samples=16, tokens=8)
    assert "noise" in failed([simulated.table(simulated.logits / 0.6)], known["bfloat16"])


def test_differences_that_do_not_matter_are_none() -> None:
    """Float32 differs by less than NEGLIGIBLE even where a pattern is certain."""
    simulated = Simulated(0, 1e-9, samples=128)
    assert failed([simulated.table(simulated.logits * (1 + NEGLIGIBLE / 10))], NOTHING) == []
    assert "slope" in failed([simulated.table(simulated.logits * (1 + 20 * NEGLIGIBLE))], NOTHING)
