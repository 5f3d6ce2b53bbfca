"""Losses: one term for each response token.

A policy loss takes one `LossInputs`, of which it reads the columns that it declares, and returns a `TokenLoss`. The
loss of a function that does not declare `weights`, those of the correction, is multiplied by them. ρ = π / π_old,
computed by `ratio`, which is always finite.
"""

from __future__ import annotations

from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.losses import clipped, covariance, distillation, plain, sequence
from rlcli.algorithms.losses.base import TokenLoss, loss_functions, ratio, unclipped
from rlcli.algorithms.losses.covariance import selectors

get = loss_functions.get
part = loss_functions.part
names = loss_functions.names
register = loss_functions.register

__all__ = [
    "LossInputs",
    "TokenLoss",
    "clipped",
    "covariance",
    "distillation",
    "plain",
    "ratio",
    "selectors",
    "sequence",
    "unclipped",
]
