"""Keys that set the same in different units, of which a layer of the configuration gives one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNSET = "unset"
"""Missing value in a recipe or `--set`: TOML has no null."""
ALTERNATIVES = {"train.steps": "train.epochs", "train.warmup_steps": "train.warmup_fraction"}
"""Key → the one that sets it in another unit. Each of the two replaces the other one of an earlier layer."""


def replaced_by(layer: Mapping[str, Any]) -> set[str]:
    """The keys of earlier layers that those of `layer` replace: their alternatives.

    >>> replaced_by({"train.epochs": 2, "train.warmup_fraction": "unset"})
    {'train.steps'}
    """
    both_ways = ALTERNATIVES | {other: key for key, other in ALTERNATIVES.items()}
    set_keys = {key for key, value in layer.items() if value != UNSET}
    return {both_ways[key] for key in set_keys & both_ways.keys()} - set_keys
