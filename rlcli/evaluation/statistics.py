"""pass@k and maj@k over the prompts of an evaluation, with intervals that stay valid near 0 and 1.

Every measure is an array with one value per prompt; `interval` computes its mean and 95% interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, fsum, prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, Float64, Int, Int16, Int64

RESAMPLES = 4_000
"""Resamples per interval: enough that two seeds differ by less than a tenth of its width."""
MOST_VALUES = 128
"""Distinct values with separate weights; if there are more, values in one of as many bins share weight and mean."""
EXACT_SUBSETS = 256
"""A majority vote of k in n samples is computed over all subsets if there are at most this many."""
VOTES = 1 << 16
"""Random votes if there are more subsets, over all prompts together."""
LEAST_VOTES = 8
"""Minimum random votes per prompt."""
AT_ONCE = 1 << 24
"""Votes and vote counts in memory at once: 0.4 GB, unless one prompt alone needs more."""

PERMUTATIONS = 10_000
"""Random sign patterns per p-value, whose smallest value is thus 1/10001."""
FEW_PAIRS = 13
"""Up to this many differing pairs, there are fewer sign patterns in total."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts and its 95% interval; `low <= mean <= high`, and `low < high`.

    >>> str(Estimate(0.5, 0.25, 0.75))
    '50.0% [25.0, 75.0]'
    """

    mean: float
    """Mean over prompts."""
    low: float
    """Lower bound of the interval."""
    high: float
    """Upper bound of the interval."""

    def __str__(self) -> str:
        return f"{self.mean:.1%} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def shown_estimate(name: str, estimate: Estimate) -> str:
    """An estimate as text: a share in percent; a mean score, which may be any number, as a number.

    >>> shown_estimate("pass@1", Estimate(0.5, 0.25, 0.75)), shown_estimate("mean@1", Estimate(0.5, 0.25, 0.75))
    ('50.0% [25.0, 75.0]', '0.500 [0.250, 0.750]')
    """
    if not name.startswith("mean@"):
        return str(estimate)
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def ks_of(samples: int) -> list[int]:
    """The k for which pass@k and maj@k are reported: 1, the powers of two below `samples`, and `samples`.

    >>> ks_of(1), ks_of(6)
    ([1], [1, 2, 4, 6])
    """
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i < samples]
    return sorted({1, *powers, samples})


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, contain a correct one if c of the n are correct.

    `1 - C(n-c, k) / C(n, k)`, the unbiased estimator of pass@k (Chen et al., arXiv 2107.03374), as a product that
    neither overflows nor cancels.

    >>> pass_at_k(n=4, c=2, k=2)  # of 6 pairs, one holds no correct answer
    0.8333333333333333
    """
    assert 0 <= c <= n, (n, c)
    assert 1 <= k <= n, (n, k)
    if n - c < k:
        return 1.0
    if k == 1:
        return c / n  # exact; the product would round
    return 1.0 - prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def pass_rates(
    counts: Int64[np.ndarray, " prompts"], right: Int64[np.ndarray, " prompts"], k: int
) -> Float64[np.ndarray, " prompts"]:
    """`pass_at_k` of each prompt, from its number of samples and of correct samples.

    No prompt has fewer than k samples.

    >>> import numpy as np
    >>> pass_rates(np.array([4, 2]), np.array([1, 2]), k=1).tolist()
    [0.25, 1.0]
    """
    import numpy as np

    span = int(right.max()) + 1
    pairs, pair_of_prompt = np.unique(counts * span + right, return_inverse=True)
    return np.array([pass_at_k(pair // span, pair % span, k) for pair in pairs.tolist()])[pair_of_prompt]


def majority_at_k(
    answers: Int[np.ndarray, "prompts n"],
    worth: Float64[np.ndarray, "prompts answers"],
    ks: Sequence[int],
    random_votes: int,
    seed: int = 0,
) -> dict[int, tuple[Float64[np.ndarray, " prompts"], bool]]:
    """maj@k of each prompt: how often the most frequent answer of k samples is correct (self-consistency, Wang et al.,
    arXiv 2203.11171), in expectation over k of its n samples, drawn without replacement.

    answers: the answer of each sample, numbered from 0 within the prompt; -1: none, which is no vote. worth: 1 if the
    answer is correct. If several answers have the most votes, each is equally likely to win, so the vote is worth their
    mean; without any vote it is worth 0.

    Returns for each k the values, and True if they are exact: over all subsets if there are at most EXACT_SUBSETS, else
    over `random_votes` random ones.
    """
    import numpy as np

    prompts, n = answers.shape
    results = {}
    for k in [k for k in ks if comb(n, k) <= EXACT_SUBSETS]:
        subsets = answers[:, np.array(list(combinations(range(n), k)))]
        results[k] = _worth_of(_votes(subsets, worth.shape[1]), worth), True
    sampled = sorted(set(ks) - set(results))
    if sampled:
        subsets = np.random.default_rng(seed).permuted(np.repeat(answers, random_votes, axis=0), axis=1)
        subsets = subsets.reshape(prompts, random_votes, n)
        votes = _votes(subsets[:, :, :0], worth.shape[1])
        # The first k of a permutation are a random subset; the subset of the next k contains it.
        for previous_k, k in zip([0, *sampled], sampled, strict=False):
            votes = votes + _votes(subsets[:, :, previous_k:k], worth.shape[1])
            results[k] = _worth_of(votes, worth), False
    return results


def _votes(subsets: Int[np.ndarray, "prompts votes k"], answers: int) -> Int16[np.ndarray, "prompts votes answers"]:
    """The number of votes for each answer, in each subset of k samples."""
    import numpy as np

    prompts, subset_count, _ = subsets.shape
    # A slot for every answer of every vote, and one before them for samples without an answer.
    slots = np.arange(prompts * subset_count).reshape(prompts, subset_count, 1) * (answers + 1) + subsets + 1
    counts = np.bincount(slots.reshape(-1), minlength=prompts * subset_count * (answers + 1))
    return counts.reshape(prompts, subset_count, answers + 1)[:, :, 1:].astype(np.int16)


def _worth_of(
    votes: Int16[np.ndarray, "prompts votes answers"], worth: Float64[np.ndarray, "prompts answers"]
) -> Float64[np.ndarray, " prompts"]:
    """The mean worth of each prompt's votes."""
    import numpy as np

    maximum = votes.max(axis=2, keepdims=True)
    winners = ((votes == maximum) & (maximum > 0)).astype(np.float64)
    won = (winners @ worth[:, :, None])[:, :, 0] / np.maximum(winners.sum(axis=2), 1.0)
    mean: Float64[np.ndarray, " prompts"] = won.mean(axis=1)
    return mean


def majorities(
    prompt: Int64[np.ndarray, " S"],
    answer: Int64[np.ndarray, " S"],
    passed: Bool[np.ndarray, " S"],
    prompts: int,
    ks: Sequence[int],
    seed: int = 0,
) -> dict[int, tuple[Float64[np.ndarray, " prompts"], bool]]:
    """k → `majority_at_k` of all prompts, which may have different numbers of samples, none fewer than k.

    answer: any numbers, equal for equal answers; below 0: none. An answer is worth the share of samples with it that
    passed. Random votes cause an error in the mean over prompts of at most 0.5 / sqrt(VOTES) = 0.002 (one standard
    deviation).
    """
    import numpy as np

    order = np.argsort(prompt, kind="stable")
    prompt, answer, passed = prompt[order], answer[order], passed[order]
    counts = np.bincount(prompt, minlength=prompts)
    column = np.arange(len(prompt)) - np.repeat(np.cumsum(counts) - counts, counts)
    local, width = _within_prompt(prompt, answer)
    slot, answered = prompt * width + local, local >= 0
    total = np.bincount(slot[answered], minlength=prompts * width)
    right = np.bincount(slot[answered], weights=passed[answered], minlength=prompts * width)
    worth = (right / np.maximum(total, 1)).reshape(prompts, width)
    table = np.full((prompts, int(counts.max())), -1, dtype=np.int16)
    table[prompt, column] = local
    random_votes = max(LEAST_VOTES, -(-VOTES // prompts))
    results = {k: (np.zeros(prompts), True) for k in ks}
    for n in np.unique(counts).tolist():
        members = np.flatnonzero(counts == n)
        prompts_at_once = max(1, AT_ONCE // (random_votes * (n + width)))
        for start in range(0, len(members), prompts_at_once):
            chunk = members[start : start + prompts_at_once]
            for k, (values, exact) in majority_at_k(
                table[chunk, :n], worth[chunk], ks, random_votes, seed + start
            ).items():
                results[k][0][chunk] = values
                results[k] = (results[k][0], results[k][1] and exact)
    return results


def _within_prompt(
    prompt: Int64[np.ndarray, " S"], answer: Int64[np.ndarray, " S"]
) -> tuple[Int64[np.ndarray, " S"], int]:
    """The answers numbered from 0 within each prompt (-1: none), and the largest such number plus one."""
    import numpy as np

    local = np.full(len(answer), -1, dtype=np.int64)
    answered = answer >= 0
    if not answered.any():
        return local, 1
    span = int(answer.max()) + 1
    pairs, pair_of_answer = np.unique(prompt[answered] * span + answer[answered], return_inverse=True)
    owner = pairs // span
    first = np.searchsorted(owner, owner)
    local[answered] = (np.arange(len(pairs)) - first)[pair_of_answer.reshape(-1)]
    return local, int(local.max()) + 1


def interval(
    values: Sequence[float] | Float64[np.ndarray, " prompts"],
    seed: int = 0,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Estimate:
    """The mean of one value per prompt, with a 95% Bayesian-bootstrap interval over prompts. bounds: of a value.

    A bootstrap over prompts keeps the samples of one prompt together, since they are not independent. The usual
    percentile bootstrap draws only observed values: it has no width after 64 zeros, and near 0 and 1 its coverage is
    far below nominal (at a pass rate of 2% and 64 prompts, 70%). So the resampling weights are Dirichlet (Rubin 1981,
    Annals of Statistics 9), and the sample contains, besides the prompts, half a prompt at each bound: one that failed
    and one that passed. With one sample per prompt this is Jeffreys' interval,
    Beta(c + ½, n - c + ½), whose coverage stays near 95% over the whole range (Brown, Cai and DasGupta 2001,
    Statistical Science 16); with many prompts it is the usual bootstrap. 64 zeros give [0, 0.039]. The interval always
    reaches the mean.
    """
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    return _estimate(mean_of(array), resampled_means(array, seed, bounds))


def average_of(
    groups: Sequence[Float64[np.ndarray, " _"]], seed: int = 0, bounds: tuple[float, float] = (0.0, 1.0)
) -> Estimate:
    """The unweighted mean of the groups' means, with an interval as above: datasets are independent, so each is
    resampled separately."""
    import numpy as np

    draws = np.mean([resampled_means(values, seed + number, bounds) for number, values in enumerate(groups)], axis=0)
    return _estimate(fsum(mean_of(values) for values in groups) / len(groups), draws)


def mean_of(values: Float64[np.ndarray, " prompts"]) -> float:
    """The mean, never outside the values: rounding must not push a mean of equal values off them."""
    return min(max(fsum(values.tolist()) / len(values), float(values.min())), float(values.max()))


def resampled_means(
    values: Float64[np.ndarray, " prompts"], seed: int = 0, bounds: tuple[float, float] = (0.0, 1.0)
) -> Float64[np.ndarray, " resamples"]:
    """RESAMPLES means of `values` under the weights that `interval` describes."""
    import numpy as np

    low, high = bounds
    assert len(values), "no prompt was evaluated"
    assert (low <= values).all(), values.min()
    assert (values <= high).all(), values.max()
    # Prompts of equal value share one gamma draw, the sum of their weights, so cost does not grow with the prompts.
    support, shapes = np.unique(np.concatenate([values, bounds]), return_counts=True)
    shapes = shapes - 0.5 * ((support == low) | (support == high))
    if len(support) > MOST_VALUES:
        bins = ((support - low) / (high - low) * MOST_VALUES).astype(np.int64)
        weight = np.bincount(bins, weights=shapes)
        support = (np.bincount(bins, weights=shapes * support) / np.maximum(weight, 1e-300))[weight > 0]
        shapes = weight[weight > 0]
    draws = np.random.default_rng(seed).standard_gamma(shapes, size=(RESAMPLES, len(support)))
    means: Float64[np.ndarray, " resamples"] = draws @ support / draws.sum(axis=1)
    return means


def _estimate(mean: float, means: Float64[np.ndarray, " resamples"]) -> Estimate:
    import numpy as np

    low, high = float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))
    return Estimate(mean, low=min(low, mean), high=max(high, mean))


def sign_flip(differences: Float64[np.ndarray, " prompts"], seed: int = 0) -> float:
    """The two-sided p-value of a paired permutation test: how often the mean difference would be as far from 0 if each
    pair's difference had either sign with equal chance (Fisher 1935, The Design of Experiments, §21).

    Uses all sign patterns if at most FEW_PAIRS pairs differ, else PERMUTATIONS random ones plus the observed one
    (Phipson and Smyth 2010, arXiv 1603.05766), with differences rounded to 1/1000 of the largest.

    >>> import numpy as np
    >>> sign_flip(np.array([0.5, 0.0, 0.25, 0.25]))  # two of the eight sign patterns are as extreme
    0.25
    """
    import numpy as np

    nonzero = differences[differences != 0.0]
    if not len(nonzero):
        return 1.0
    if len(nonzero) <= FEW_PAIRS:
        signs = 1 - 2 * (np.arange(1 << len(nonzero))[:, None] >> np.arange(len(nonzero)) & 1)
        sums = np.abs(signs @ nonzero)
        return float((sums >= abs(nonzero.sum()) - 1e-9).mean())
    steps = np.rint(nonzero / np.abs(nonzero).max() * 1000).astype(np.int64)
    sizes, counts = np.unique(np.abs(steps), return_counts=True)
    # Among the differences of one size, only the number of positive ones matters.
    positive = np.random.default_rng(seed).binomial(counts, 0.5, size=(PERMUTATIONS, len(sizes)))
    sums = np.abs((2 * positive - counts) @ sizes)
    return float((1 + (sums >= abs(int(steps.sum()))).sum()) / (1 + PERMUTATIONS))
