"""Losses: one term for each response token.

A policy loss takes, by name, any of: `log_probs` (float [T], log π of the tokens, with gradient), `old_log_probs`
(float [T], log π_old, the behaviour policy as the trainer computes it), `advantages` (float [T], A of each token),
`sequence` (int64 [T], which sequence of this micro-batch a token belongs to), `lengths` (int64 [S], their response
tokens), `reference_log_probs` (float [T]), `pairs` (int64 [S]), `selected` (bool [T], the tokens chosen by the selector
registered under the loss's name) and `weights` (float [T], of the correction; the loss of a function that does not
declare them is multiplied by them). It returns a `TokenLoss`. ρ = π / π_old, computed by `ratio`, which is always
finite.
"""

from __future__ import annotations

from rlcli.algorithms.losses.base import LossFunction, TokenLoss, loss_functions, ratio, unclipped
from rlcli.algorithms.losses.clipped import cispo, dppo_tv, ppo, sapo
from rlcli.algorithms.losses.covariance import (
    SelectorFunction,
    clip_cov,
    kl_cov,
    select_clip_cov,
    select_kl_cov,
    selectors,
)
from rlcli.algorithms.losses.critic import implicit_reward_loss, process_rewards, value_loss
from rlcli.algorithms.losses.plain import dro, gpg
from rlcli.algorithms.losses.sequence import dpo, gmpo, gspo, sppo

get = loss_functions.get
names = loss_functions.names
register = loss_functions.register

__all__ = [
    "LossFunction",
    "SelectorFunction",
    "TokenLoss",
    "cispo",
    "clip_cov",
    "dpo",
    "dppo_tv",
    "dro",
    "get",
    "gmpo",
    "gpg",
    "gspo",
    "implicit_reward_loss",
    "kl_cov",
    "names",
    "ppo",
    "process_rewards",
    "ratio",
    "register",
    "sapo",
    "select_clip_cov",
    "select_kl_cov",
    "selectors",
    "sppo",
    "unclipped",
    "value_loss",
]
