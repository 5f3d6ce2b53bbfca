"""Prompts with pictures, as vLLM takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcli.images.rule import ImageRule
    from rlcli.rollout.engine import EngineSpec

NEVER = -100.0
"""Added to the logits of tokens that are not drawn; vLLM takes no less."""


def settings(spec: EngineSpec) -> dict[str, Any]:
    """No cache of processed pictures: a picture is seen by the samples of one group, whose prefix is cached. No pass
    over the largest picture to measure memory on CPUs, where nothing is measured."""
    return {
        "limit_mm_per_prompt": {"image": max(1, spec.pictures), "video": 0},
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": spec.device == "cpu",
    }


def shown(rule: ImageRule | None, prompt: Any, pictures: Sequence[Any]) -> dict[str, Any]:
    """A prompt with one placeholder a picture, which vLLM repeats itself."""
    if not pictures:
        return {"prompt_token_ids": prompt.tolist()}
    from PIL import Image

    assert rule is not None, "refused before the run starts"
    images = [Image.fromarray(picture) for picture in pictures]
    return {"prompt_token_ids": rule.collapsed(prompt, pictures).tolist(), "multi_modal_data": {"image": images}}
