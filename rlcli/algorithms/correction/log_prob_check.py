"""Statistics of the log-prob check: whether engine and trainer compute the same function at equal weights.

Engine and trainer give each token a log-prob under the same weights, log μ and log π. Both round, in another order of
operations, so Δ = log π − log μ is never 0. A fault of the computation differs from that noise in its pattern.

Each statistic is computed from a table with one row a sample (`sample_table`), whose columns are sums over the
sample's tokens (`COLUMNS`). Tokens of a sample are not independent, so standard errors are of samples: for an estimate
that is a smooth function of the column totals, the sum over the samples of its squared first-order influence
(a sandwich estimate). All of the location statistics are tested against 0, with nothing calibrated, so that a fault
that is there from the first step is found too:

mean      Σ d ÷ T. Not 0: log-probs that are not normalised alike (top-p, a mask of ids, a bias)
slope     of d on x = (log π + log μ) ÷ 2, by least squares. Not 0: logits are scaled, or the temperature differs

For tokens sampled from μ, E[Δ] is −KL(μ ‖ π), which noise alone makes negative, and more so where the entropy
is high: it would be found as a mean and as a slope. With d = √(π/μ) · ψ(Δ), ψ odd, and x symmetric in π and μ, each
expectation E_μ[d · f(x)] = Σ √(μπ) ψ(Δ) f(x) changes its sign if the two are exchanged, so it is 0 when their noise
has one law. ψ clips at ±CLIP, so that no single token decides. Tokens not sampled from μ have no weight √(π/μ).

The scale of the noise depends on how sure the policy is: noise on the logits moves log p by about (1 − p) of itself. So
noise is measured in units of 1 − p, which makes it nearly independent of the policy's entropy:

noise     ν = Σ |Δ| ÷ Σ (1 − p). Compared with that of the trainer alone, whose outputs are rounded once more at random
          (`rlcli.model.rounding`): it may be SCALE times as large
position  ν of tokens beyond half of the samples' mean length − ν of those before: a fault of positions or of the
          attention's mask grows with the distance
samples   ν of the worst sample: a fault in a few of them, such as shifted positions or a wrong mask
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64

COLUMNS = ("tokens", "x", "xx", "d", "xd", "a", "e", "late_a", "late_e", "k3", "ee", "largest")
"""Figures of one sample: the number of its tokens; the sums over them of x, x², d, x·d, |Δ| and 1 − p; of |Δ| and 1 − p
beyond half of the samples' mean length; of π/μ − 1 − Δ and (1 − p)²; and the largest |Δ|, infinite if one is NaN."""
MOMENTS = COLUMNS.index("k3") + 1
"""Number of columns whose products are summed."""
CLIP = 3.0
"""Nats beyond which a token's Δ counts no more in d."""
Z = 6.0
"""Standard deviations of a normal variable: 2e-9 of its values lie further off, on either side."""
LEAST_SAMPLES = 8
"""Samples, effectively, from which standard errors are estimated."""
LEAST_TOKENS, GROSS = 64, 3.0
"""Tokens of fewer samples from which ν is looked at, and the largest ν ÷ ν of the trainer then."""
NEGLIGIBLE = 1e-4
"""Nats that never matter, whatever the dtype."""
MEAN, SLOPE = 1.0, 0.6
"""Largest mean and slope, ÷ (ν of the trainer)², that two sound implementations may have: where one of them rounds less
than the other, the symmetry above holds up to such terms of second order (measured: 1.1 and 0.4, one without noise)."""
SCALE = 1.3
"""Largest ν ÷ ν of the trainer. Measured where all is sound: 0.57 and 1.04 of a tiny model in bfloat16 and float32,
0.86 to 0.97 of SmolLM2-135M in bfloat16, all on CPUs."""
ALONE = 2.0
"""Standard errors of ν of the trainer that are added to it: with 512 tokens one is about 5%."""
POSITION = 0.5
"""Largest difference of late and early tokens ÷ ν."""
SAMPLE, SPREAD, TOKEN = 2.0, 8.0, 10.0
"""See `worst_sample`."""


def sample_table(trainer: np.ndarray, engine: np.ndarray, lengths: np.ndarray, *, sampled: bool) -> np.ndarray:
    """`COLUMNS` of each sample that has tokens: float64 `[samples, columns]`.

    trainer, engine: log π and log μ, `[T]`, sample by sample. lengths: int `[S]`, tokens of each sample, T in all.
    sampled: the tokens were sampled from μ.

    Two tokens of one sample; the trainer finds the second twice as likely as the engine does:

    >>> import numpy as np
    >>> half, fourth = np.log(0.5), np.log(0.25)
    >>> table = sample_table(np.array([half, half]), np.array([half, fourth]), np.array([2]), sampled=False)
    >>> row = dict(zip(COLUMNS, table[0].round(3).tolist()))
    >>> row["tokens"], row["a"], row["late_a"], row["largest"]
    (2.0, 0.693, 0.693, 0.693)
    """
    import numpy as np

    lengths = np.asarray(lengths)[np.asarray(lengths) > 0]
    samples, starts = len(lengths), np.cumsum(lengths) - lengths
    sample: np.ndarray = np.repeat(np.arange(samples), lengths)
    late = np.arange(len(sample)) - starts[sample] >= (lengths.mean() / 2 if samples else 0)
    pi, mu = np.asarray(trainer, np.float64), np.asarray(engine, np.float64)
    with np.errstate(invalid="ignore"):  # −∞ less −∞
        difference, x = pi - mu, (pi + mu) / 2
    finite = np.isfinite(difference)
    difference, x = np.where(finite, difference, 0.0), np.where(finite, x, 0.0)
    d = np.clip(difference, -CLIP, CLIP)
    d = d * np.exp(d / 2) if sampled else d
    a, e = np.abs(difference), -np.expm1(np.minimum(x, 0.0))
    ratio = np.clip(difference, -20.0, 20.0)
    k3 = np.expm1(ratio) - ratio
    summed = (np.ones_like(x), x, x * x, d, x * d, a, e, a * late, e * late, k3, e * e)
    table: np.ndarray = np.zeros((samples, len(COLUMNS)))
    for column, values in enumerate(summed):
        table[:, column] = np.bincount(sample, weights=values, minlength=samples)
    np.maximum.at(table[:, -1], sample, np.where(finite, a, np.inf))
    return table


def joined(tables: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of all tables."""
    import numpy as np

    rows: np.ndarray = np.concatenate([np.zeros((0, len(COLUMNS))), *tables])
    return rows


class MomentsState(TypedDict):
    """`Moments` as plain values, for checkpoints."""

    sums: list[float]
    """`[MOMENTS]`."""
    products: list[list[float]]
    """`[MOMENTS, MOMENTS]`."""
    weights: float
    """Σ w."""
    squares: float
    """Σ w²."""


@dataclass(frozen=True)
class Moments:
    """Weighted sums over samples, sufficient for every statistic but that of single samples.

    Moments of several steps are added; a weight w below 1 lets earlier steps count less. v is the vector of a sample's
    first `MOMENTS` columns.
    """

    sums: Float64[np.ndarray, " M"]
    """Σ w v."""
    products: Float64[np.ndarray, "M M"]
    """Σ w² v vᵀ."""
    weights: float = 0.0
    """Σ w."""
    squares: float = 0.0
    """Σ w²."""

    @classmethod
    def of(cls, table: np.ndarray) -> Moments:
        """The moments of the samples of one table, each with weight 1."""
        v = table[:, :MOMENTS]
        return cls(v.sum(axis=0), v.T @ v, float(len(v)), float(len(v)))

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.sums + other.sums,
            self.products + other.products,
            self.weights + other.weights,
            self.squares + other.squares,
        )

    def scaled(self, weight: float) -> Moments:
        """The same samples with another weight."""
        square = weight * weight
        return Moments(weight * self.sums, square * self.products, weight * self.weights, square * self.squares)

    @property
    def samples(self) -> float:
        """Effective number of samples: (Σ w)² ÷ Σ w²."""
        return self.weights**2 / self.squares if self.squares else 0.0

    def total(self, column: str) -> float:
        """The sum of a column."""
        return float(self.sums[COLUMNS.index(column)])

    def error(self, gradient: Mapping[str, float]) -> float:
        """Standard error of an estimate that depends on the ratios of the sums alone. gradient: its derivative by each
        of them. The influence of a sample is gradient · v, whose mean over the samples is 0."""
        import numpy as np

        g = np.zeros(MOMENTS)
        for column, derivative in gradient.items():
            g[COLUMNS.index(column)] = derivative
        n = self.samples
        return math.sqrt(max(float(g @ self.products @ g), 0.0) * n / (n - 1)) if n > 1 else math.inf

    def __reduce__(self) -> tuple[Callable[[bytes, float, float], Moments], tuple[bytes, float, float]]:
        """Pickled as half of the symmetric products and without the arrays' headers: each rank sends it in each
        step."""
        import numpy as np

        half = self.products[np.triu_indices(MOMENTS)]
        return Moments._unpickled, (np.concatenate([self.sums, half]).tobytes(), self.weights, self.squares)

    @classmethod
    def _unpickled(cls, values: bytes, weights: float, squares: float) -> Moments:
        import numpy as np

        numbers: np.ndarray = np.frombuffer(values)
        products: np.ndarray = np.zeros((MOMENTS, MOMENTS))
        rows, columns = np.triu_indices(MOMENTS)
        products[rows, columns] = products[columns, rows] = numbers[MOMENTS:]
        return cls(numbers[:MOMENTS], products, weights, squares)

    def state(self) -> MomentsState:
        """As plain values."""
        return {
            "sums": self.sums.tolist(),
            "products": self.products.tolist(),
            "weights": self.weights,
            "squares": self.squares,
        }

    @classmethod
    def restored(cls, state: MomentsState) -> Moments:
        import numpy as np

        return cls(np.array(state["sums"]), np.array(state["products"]), state["weights"], state["squares"])


@dataclass(frozen=True)
class LogProbComparison:
    """Engine against trainer on some samples, as sums over their table. Comparisons of several workers are added."""

    moments: Moments
    """Moments of the samples."""
    worst_sample: float = 0.0
    """Largest deviation of a single sample (see the function `worst_sample`)."""
    largest: float = 0.0
    """Largest |Δ| of a token; infinite if one is NaN."""

    @classmethod
    def of(cls, table: np.ndarray) -> LogProbComparison:
        return cls(Moments.of(table), worst_sample(table), float(table[:, -1].max(initial=0.0)))

    @property
    def tokens(self) -> float:
        """Tokens that were compared."""
        return self.moments.total("tokens")

    def __add__(self, other: LogProbComparison) -> LogProbComparison:
        return LogProbComparison(
            self.moments + other.moments,
            max(self.worst_sample, other.worst_sample),
            max(self.largest, other.largest),
        )


@dataclass(frozen=True)
class Estimate:
    """An estimate and its standard error."""

    value: float
    error: float


def mean_of(m: Moments) -> Estimate:
    """Σ d ÷ T."""
    n, d = m.total("tokens"), m.total("d")
    return Estimate(d / n, m.error({"d": 1 / n, "tokens": -d / n**2}))


def slope_of(m: Moments) -> Estimate:
    """(T Σ x d − Σ x Σ d) ÷ (T Σ x² − (Σ x)²)."""
    n, x, xx, d, xd = (m.total(name) for name in ("tokens", "x", "xx", "d", "xd"))
    q = n * xx - x * x
    if not q > 1e-12 * n * xx:  # all x are alike: no slope
        return Estimate(0.0, math.inf)
    b = (n * xd - x * d) / q
    gradient = {"tokens": xd - b * xx, "xd": n, "x": -d + 2 * b * x, "d": -x, "xx": -b * n}
    return Estimate(b, m.error({name: value / q for name, value in gradient.items()}))


def noise_of(m: Moments) -> Estimate:
    """ν = Σ |Δ| ÷ Σ (1 − p)."""
    a, e = m.total("a"), m.total("e")
    return Estimate(a / e, m.error({"a": 1 / e, "e": -a / e**2})) if e > 0 else Estimate(0.0, math.inf)


def position_of(m: Moments) -> Estimate:
    """ν of the late tokens − ν of the others."""
    a, e, late_a, late_e = (m.total(name) for name in ("a", "e", "late_a", "late_e"))
    early_a, early_e = a - late_a, e - late_e
    if not (late_e > 0 and early_e > 0):
        return Estimate(0.0, math.inf)
    late, early = late_a / late_e, early_a / early_e
    gradient = {
        "late_a": 1 / late_e + 1 / early_e,
        "late_e": -late / late_e - early / early_e,
        "a": -1 / early_e,
        "e": early / early_e,
    }
    return Estimate(late - early, m.error(gradient))


def worst_sample(table: np.ndarray) -> float:
    """The largest Σ |Δ| ÷ (SAMPLE Σ (1 − p) + SPREAD √Σ (1 − p)² + TOKEN) of a sample; 0 without samples.

    It stays below ν: a sample's Σ |Δ| is ν Σ (1 − p) on average, up to SAMPLE times that where its tokens are of
    another kind, and its standard deviation is about 0.75 ν √Σ (1 − p)². The noise of single tokens has longer tails
    than a normal variable: SPREAD is 10 standard deviations, and TOKEN room for one of them in a short response. A run
    of SmolLM2-135M in bfloat16 has thousands of samples; 1.3, 5.5 and 3 gave one false alarm in two runs.
    """
    import numpy as np

    a, e, ee = (table[:, COLUMNS.index(name)] for name in ("a", "e", "ee"))
    return float((a / (SAMPLE * e + SPREAD * np.sqrt(ee) + TOKEN)).max(initial=0.0))


def deviations(samples: float) -> float:
    """Standard errors that an estimate from this number of samples may be off: the quantile of Student's distribution
    beyond which it lies as rarely as a normal variable beyond Z, by its expansion in 1 ÷ degrees of freedom (DLMF 26.9;
    Abramowitz and Stegun 26.7.5).

    >>> [round(deviations(n), 1) for n in (16, 64, 1e9)]
    [12.4, 7.0, 6.0]
    """
    n, z = max(samples - 1.0, 1.0), Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / n ** (power + 1) for power, term in enumerate(terms))


@dataclass(frozen=True)
class Statistic:
    """One statistic of the check, and its bound."""

    name: str
    """Name of the statistic."""
    value: float
    """Measured value."""
    bound: float
    """Largest absolute value that passes."""
    meaning: str
    """Usual cause of a larger value."""

    @property
    def holds(self) -> bool:
        return abs(self.value) <= self.bound  # a NaN does not


def statistics(moments: Moments, step: LogProbComparison, trainer: Moments) -> list[Statistic]:
    """All statistics, those of a particular cause first. moments: of the last steps' samples; step: this step's;
    trainer: of the trainer alone, whose layers rounded once more, against itself."""
    results = [Statistic("nonfinite", float(not math.isfinite(step.largest)), 0.0, "a log-prob is NaN or infinite")]
    nu, alone = noise_of(moments), noise_of(trainer)
    noise = alone.value
    if moments.samples < LEAST_SAMPLES:
        enough = moments.total("tokens") >= LEAST_TOKENS
        gross = Statistic("noise", nu.value, NEGLIGIBLE + GROSS * noise, "weights or kernels differ")
        return [*results, gross] if enough else results
    quantile = deviations(moments.samples)
    for name, estimate, room, meaning in (
        ("slope", slope_of(moments), SLOPE * noise**2, "the temperature or the scale of the logits differs"),
        ("mean", mean_of(moments), MEAN * noise**2, "top-p, a mask of ids or a bias on one side only"),
        ("position", position_of(moments), POSITION * nu.value, "rotary positions or the attention's mask differ"),
    ):
        results.append(Statistic(name, estimate.value, NEGLIGIBLE + room + quantile * estimate.error, meaning))
    few = "positions, masks or cached prefixes differ in a few samples"
    other = "another precision, kernel or layer, or stale copies of weights"
    results.append(Statistic("worst_sample", step.worst_sample, NEGLIGIBLE + nu.value, few))
    known = SCALE * (noise + ALONE * alone.error) if trainer.samples >= LEAST_SAMPLES else GROSS * noise
    # A fault makes the standard error larger too: what counts is that of noise as large as the trainer's.
    sound = nu.error * min(1.0, (NEGLIGIBLE + noise) / nu.value) if nu.value else nu.error
    results.append(Statistic("noise", nu.value, NEGLIGIBLE + known + quantile * sound, other))
    return results
