"""Advantages from rewards. `groups` has the response-level functions, `turns` those that give each turn its own,
`tokens` the token-level ones.

A custom function takes any of the inputs that those modules name, and is registered by name:

    from rlcli.algorithms.advantages import register

    @register("centred")
    def centred(rewards, groups):
        return rewards - rewards.mean()
"""

from __future__ import annotations

from rlcli.algorithms.advantages import groups, tokens, turns
from rlcli.algorithms.advantages.base import AdvantageFunction, TokenAdvantages, get, names, register, rules
from rlcli.algorithms.advantages.moments import whiten

__all__ = [
    "AdvantageFunction",
    "TokenAdvantages",
    "get",
    "groups",
    "names",
    "register",
    "rules",
    "tokens",
    "turns",
    "whiten",
]
