"""Advantages from rewards. `groups` has the response-level functions, `turns` those that give each turn its own,
`tokens` the token-level ones.

A custom function takes one `AdvantageInputs`, of which it declares the columns that it reads, and is registered by
name:

    from rlcli.algorithms.advantages import register

    @register("centred", needs=("rewards",))
    def centred(inputs):
        return inputs.rewards - inputs.rewards.mean()
"""

from __future__ import annotations

from rlcli.algorithms.advantages import groups, tokens, turns
from rlcli.algorithms.advantages.base import AdvantageFunction, TokenAdvantages, get, names, part, register, rules
from rlcli.algorithms.advantages.moments import whiten
from rlcli.algorithms.inputs import AdvantageInputs

__all__ = [
    "AdvantageFunction",
    "AdvantageInputs",
    "TokenAdvantages",
    "get",
    "groups",
    "names",
    "part",
    "register",
    "rules",
    "tokens",
    "turns",
    "whiten",
]
