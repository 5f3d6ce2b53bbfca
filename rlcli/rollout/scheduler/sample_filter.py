"""Exclusion of samples from a step: failed verifications and masked responses count in neither loss nor statistics.

An excluded sample is removed before anything is computed from the step: it is in no loss, denominator, group mean,
standard deviation or baseline, whitening or criterion of dynamic sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rlcli.algorithms.algorithm import Algorithm
from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable, TruncatedRule
from rlcli.types import UNVERIFIED, Outcome, Verdict, is_reward

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, Int8

REASONS = ("timeout", "crash", "truncated", "environment", "unparsed", "baseline", "alone")
"""Reasons to exclude a sample: its verification timed out or crashed; it was cut off at the limit; its environment
failed; its judge's reply could not be read; the verification of its group's greedy baseline failed; it is the only
remaining sample of a group whose samples are compared."""


def rewarded(samples: SampleTable, rule: TruncatedRule) -> SampleTable:
    """Apply `train.truncated` to rewards: with zero_reward, truncated responses get 0, as do their parts and turns."""
    import numpy as np

    if rule != "zero_reward" or not samples.truncated.any():
        return samples
    parts = {
        name: np.where(samples.truncated & ~np.isnan(v), 0.0, v) if is_reward(name) else v
        for name, v in samples.parts.items()
    }
    by_turn = np.where(samples.truncated[:, None], 0.0 * samples.turn_rewards, samples.turn_rewards)  # NaN stays NaN
    return replace(samples, score=np.where(samples.truncated, 0.0, samples.score), parts=parts, turn_rewards=by_turn)


def correct_mask(samples: SampleTable, config: RunConfig) -> Bool[np.ndarray, " S"]:
    """Mask of correct samples, without those whose reward was set to 0 because they were truncated."""
    correct = samples.is_(Outcome.OK)
    return correct & ~samples.truncated if config.train.truncated == "zero_reward" else correct


def exclusion_reasons(
    samples: SampleTable, rule: TruncatedRule, baselines: Mapping[int, Verdict] | None = None, *, compared: bool = False
) -> Int8[np.ndarray, " S"]:
    """The reason to exclude each sample: 0 if it counts, else 1 + its index in `REASONS`.

    baselines: prompt → verdict on its greedy response; a group whose baseline failed is excluded. compared: the samples
    of a group are compared with one another, so that the only remaining sample of a larger group is excluded too.
    """
    import numpy as np

    reasons = samples.exclusion_reasons(rule)
    failed = [prompt for prompt, verdict in (baselines or {}).items() if verdict.outcome in UNVERIFIED]
    reasons[(reasons == 0) & np.isin(samples.prompt, failed)] = 1 + REASONS.index("baseline")
    if compared and reasons.any():
        _, group, sizes = np.unique(samples.prompt, return_inverse=True, return_counts=True)
        remaining = np.bincount(group, weights=reasons == 0, minlength=len(sizes))
        reasons[(reasons == 0) & ((remaining == 1) & (sizes > 1))[group]] = 1 + REASONS.index("alone")
    return reasons


def compares_group(algorithm: Algorithm) -> bool:
    """True if the algorithm compares the samples of one prompt with one another."""
    return algorithm.selects_pairs or "groups" in algorithm.advantage.needs
