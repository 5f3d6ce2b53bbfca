"""The families of vision-language models, and the rule of each."""

from __future__ import annotations

from typing import Any

from rlcli.images.image_rule import ImageRule
from rlcli.images.internvl_tiles import TileRule
from rlcli.images.qwen_patches import PatchRule

KINDS: dict[str, type[ImageRule]] = {
    "internvl": TileRule,
    "qwen2_5_vl": PatchRule,
    "qwen3_vl": PatchRule,
    "qwen3_5": PatchRule,
    "qwen3_5_moe": PatchRule,
}
"""By `model_type`: those whose packed log-probs are tested against their own padded forward pass."""


def rule_of(path: str, config: Any) -> ImageRule | None:
    """The image rule of the model at `path`, a folder or hub id, with this config; None for a text model. Raises
    `OSError` or `ValueError` if its files have no image preprocessing."""
    return KINDS[config.model_type].of(path, config) if config.model_type in KINDS else None
