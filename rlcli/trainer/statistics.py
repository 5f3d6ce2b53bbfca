"""pass@k over the prompts of an evaluation, with intervals that stay honest at 0 and at 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, prod

RESAMPLES = 10_000
"""Draws behind an interval: enough that two seeds differ by less than a tenth of its width."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts and its 95% interval, all in [0, 1]; `low <= mean <= high`, and `low < high`.

    >>> str(Estimate(0.5, 0.25, 0.75))
    '50.0% [25.0, 75.0]'
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.1%} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True, slots=True)
class PassReport:
    """What an evaluation found. prompts, samples: how many were scored; passed: k → the estimate of pass@k.

    >>> summarise([[True, True], [False, True]], ks=[2]).passed[2].mean
    1.0
    """

    prompts: int
    samples: int
    passed: Mapping[int, Estimate]

    def metrics(self) -> dict[str, float]:
        """Flat, for a tracker: `pass@1`, `pass@1/low`, `pass@1/high`, …, `prompts`, `samples`."""
        flat: dict[str, float] = {}
        for k, estimate in self.passed.items():
            flat |= {f"pass@{k}": estimate.mean, f"pass@{k}/low": estimate.low, f"pass@{k}/high": estimate.high}
        return flat | {"prompts": self.prompts, "samples": self.samples}


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, hold a right one when c of the n are right.

    `1 - C(n-c, k) / C(n, k)`, the unbiased estimator of pass@k (Chen et al., arXiv 2107.03374), as a product that
    neither overflows nor cancels.

    >>> pass_at_k(n=4, c=2, k=2)  # of 6 pairs, one holds no right answer
    0.8333333333333333
    """
    assert 0 <= c <= n, (n, c)
    assert 1 <= k <= n, (n, k)
    if n - c < k:
        return 1.0
    if k == 1:
        return c / n  # exactly, where the product would round
    return 1.0 - prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def interval(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean of one value in [0, 1] a prompt, with a 95% Bayesian-bootstrap interval over prompts.

    A bootstrap over prompts keeps together the samples of one prompt, which are not independent. The usual percentile
    bootstrap can draw only what it has seen: it has no width after 64 zeros, and near 0 and 1 it holds the truth far
    less often than it says (at a pass rate of 2% and 64 prompts, 70% of the time). So the resampling weights are
    Dirichlet (Rubin 1981, Annals of Statistics 9) and the sample holds, besides the prompts, half a prompt that failed
    and half a prompt that passed. With one sample a prompt this is Jeffreys' interval, Beta(c + ½, n - c + ½), whose
    coverage stays near 95% over the whole range (Brown, Cai and DasGupta 2001, Statistical Science 16); with many
    prompts it is the usual bootstrap. 64 zeros give [0, 0.039]. The interval always reaches the mean.
    """
    import numpy as np

    assert values, "no prompt was evaluated"
    assert all(0.0 <= value <= 1.0 for value in values), values
    # Rounding must not push a mean of equal values off them.
    mean = min(max(fsum(values) / len(values), min(values)), max(values))
    counts = Counter(values)
    # Prompts of equal value share one gamma draw, the sum of their weights, so the cost does not grow with the prompts.
    support = sorted({0.0, 1.0, *counts})
    shapes = [counts[value] + 0.5 * (value in (0.0, 1.0)) for value in support]
    draws = np.random.default_rng(seed).standard_gamma(shapes, size=(RESAMPLES, len(support)))
    means = draws @ np.array(support) / draws.sum(axis=1)
    low, high = float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))
    return Estimate(mean, low=min(low, mean), high=max(high, mean))


def summarise(scores: Sequence[Sequence[bool]], ks: Sequence[int] = (1,), seed: int = 0) -> PassReport:
    """pass@k of `scores[prompt][sample]`, whether that sample is right. Every prompt has at least max(ks) samples.

    pass@1 is always among the estimates. `seed` is that of the intervals, so that a report is reproducible.
    """
    assert scores, "no prompt was evaluated"
    passed = {
        k: interval([pass_at_k(len(row), sum(map(bool, row)), k) for row in scores], seed) for k in sorted({1, *ks})
    }
    return PassReport(prompts=len(scores), samples=sum(map(len, scores)), passed=passed)
