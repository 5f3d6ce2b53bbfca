"""How rewards become advantages. `groups` has the functions of a response's reward, `tokens` those of each token's.

A function of one's own takes any of the inputs that those modules name, and is registered by name:

    from rlcli.algorithms.advantages import register

    @register("centred")
    def centred(rewards, groups):
        return rewards - rewards.mean()
"""

from __future__ import annotations

from rlcli.algorithms.advantages import groups, tokens
from rlcli.algorithms.advantages.base import AdvantageFunction, TokenAdvantages, get, names, register
from rlcli.algorithms.advantages.moments import whiten

__all__ = ["AdvantageFunction", "TokenAdvantages", "get", "groups", "names", "register", "tokens", "whiten"]
