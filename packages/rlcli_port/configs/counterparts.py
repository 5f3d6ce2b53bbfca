"""Our keys by the names of their counterparts in verl and TRL, for suggestions in error messages."""

from __future__ import annotations

from functools import cache

from rlcli_port.configs import trl_keys, verl_keys

SHORTEST_NAME = 4
"""Shorter last parts, such as `len`, are too common to be recognised alone. `n` is known by what stands before it."""
COMMON = ("enable", "name", "path", "type")


def counterparts(name: str) -> list[str]:
    """Keys that set what the key `name` of verl or TRL sets. `name` may lack its first parts, or have others.

    >>> counterparts("train.learning_rate"), counterparts("rollout.n"), counterparts("actor.optim.lr")
    (['train.lr'], ['rollout.samples_per_prompt'], ['train.lr'])
    >>> counterparts("train.stepz")
    []
    """
    parts = name.split(".")
    matching_parts = {theirs: _common_ending(parts, theirs.split(".")) for theirs in _keys()}
    best = max(matching_parts.values())
    recognised = len(parts[-1]) >= SHORTEST_NAME and parts[-1] not in COMMON
    if best == 0 or (best == 1 and not recognised and name not in matching_parts):
        return []
    return list(
        dict.fromkeys(ours for theirs, count in matching_parts.items() if count == best for ours in _keys()[theirs])
    )


@cache
def _keys() -> dict[str, tuple[str, ...]]:
    """Their key → ours."""
    table: dict[str, tuple[str, ...]] = {}
    for tables in (trl_keys, verl_keys):
        table |= {theirs: (ours,) for theirs, (ours, _) in tables.DIRECT.items()}
        table |= tables.COMPUTED
    return table


def _common_ending(parts: list[str], others: list[str]) -> int:
    """Number of equal parts at the end."""
    pairs = zip(reversed(parts), reversed(others), strict=False)
    return next((count for count, (part, other) in enumerate(pairs) if part != other), min(len(parts), len(others)))
