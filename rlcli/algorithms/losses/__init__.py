"""Losses: one term for each response token.

A policy loss takes, by name, any of: `log_probs` (float [T], log π of the tokens, with gradient), `old_log_probs`
(float [T], log π_old, the behaviour policy as the trainer computes it), `advantages` (float [T], A of each token),
`sequence` (int64 [T], which sequence of this micro-batch a token belongs to), `lengths` (int64 [S], their response
tokens), `reference_log_probs` (float [T]), `pairs` (int64 [S]), `selected` (bool [T], the tokens chosen by the selector
registered under the loss's name), `teacher_log_probs` (float [T], log ν of the tokens), `candidate_log_probs` and
`teacher_top_log_probs` (float [T, K], log π, with gradient, and log ν of the teacher's K likeliest tokens at each
position) and `weights` (float [T], of the correction; the loss of a function that does not
declare them is multiplied by them). It returns a `TokenLoss`. ρ = π / π_old, computed by `ratio`, which is always
finite.
"""

from __future__ import annotations

from rlcli.algorithms.losses import clipped, covariance, distillation, plain, sequence
from rlcli.algorithms.losses.base import TokenLoss, loss_functions, ratio, unclipped
from rlcli.algorithms.losses.covariance import selectors

get = loss_functions.get
names = loss_functions.names
register = loss_functions.register

__all__ = ["TokenLoss", "clipped", "covariance", "distillation", "plain", "ratio", "selectors", "sequence", "unclipped"]
