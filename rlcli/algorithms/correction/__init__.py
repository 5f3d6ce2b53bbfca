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

from rlcli.algorithms.correction.base import CorrectionFunction, Corrections, get, names, register, rejects
from rlcli.algorithms.correction.mismatch import mismatch_metrics, mismatch_sums
from rlcli.algorithms.correction.rejection import geometric_mask, off_policy_mask, sequence_mask, token_mask
from rlcli.algorithms.correction.weights import bypass, icepop, none, sequence_icepop, sequence_tis, token_tis

__all__ = [
    "CorrectionFunction",
    "Corrections",
    "bypass",
    "geometric_mask",
    "get",
    "icepop",
    "mismatch_metrics",
    "mismatch_sums",
    "names",
    "none",
    "off_policy_mask",
    "register",
    "rejects",
    "sequence_icepop",
    "sequence_mask",
    "sequence_tis",
    "token_mask",
    "token_tis",
]
