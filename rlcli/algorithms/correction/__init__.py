"""Corrections for the engine, whose sampling probabilities differ slightly from those that the trainer computes.

Every function takes `LossInputs`, of which it may declare `old_log_probs` (the trainer's log π of the policy at the
start of the step), `rollout_log_probs` (log μ as the engine reported it), `log_probs` (log π in this update, without
gradient), `advantages`, `sequence` and `lengths`, and returns the weight of each token's policy loss (float [R], dtype
of the log-probs, without gradient). r = π_old / μ = exp(clamp(log π_old − log μ, ±20)), computed in float64. For a
response, Π is the product of its r, with log Π clamped likewise, and G is their geometric mean.

All share one table of options: `correction_cap`, `correction_low`, `correction_high`, `off_policy_threshold`. Bounds
are those of π / μ. `algorithm.correction` may join several with `*`, as in `sequence_tis * geometric_mask`.
"""

from __future__ import annotations

from rlcli.algorithms.correction import rejection, weights
from rlcli.algorithms.correction.base import get, names, part, register

__all__ = ["get", "names", "part", "register", "rejection", "weights"]
