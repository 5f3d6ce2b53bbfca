"""Corrections for the engine, whose sampling probabilities differ slightly from those that the trainer computes.

Every function takes, by name, any of `log_probs` (float [T], the trainer's log π of the policy that generated),
`rollout_log_probs` (float [T], log μ as the engine reported it), `policy_log_probs` (float [T], log π in this update,
without gradient), `advantages` (float [T]), `sequence` (int64 [T]) and `lengths` (int64 [S]), and returns the weight of
each token's policy loss (float [T], dtype of the log-probs, without gradient). r = π / μ = exp(clamp(log π − log μ,
±20)), computed in float64. For a response, Π is the product of its r, with log Π clamped likewise, and G is their
geometric mean.

All share one table of options: `correction_cap`, `correction_low`, `correction_high`, `off_policy_threshold`. Bounds
are those of π / μ. `algorithm.correction` may join several with `*`, as in `sequence_tis * geometric_mask`.
"""

from __future__ import annotations

from rlcli.algorithms.correction import rejection, weights
from rlcli.algorithms.correction.base import get, names, register, rejects

__all__ = ["get", "names", "register", "rejection", "rejects", "weights"]
