"""Prompts with images, as vLLM takes them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlcli.errors import SetupError

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32, UInt8
    from vllm.multimodal.inputs import MultiModalKwargsItems

    from rlcli.images.image_rule import ImageRule
    from rlcli.rollout.engine import EngineSpec
    from rlcli.rollout.vllm.vllm_types import Llm

    Images = Sequence[UInt8[np.ndarray, "height width 3"]]

NEVER = -100.0
"""Added to the logits of tokens that must not be sampled; vLLM takes no less."""


def settings(spec: EngineSpec) -> dict[str, object]:
    """No cache of processed images: an image belongs to the samples of one group, whose prefix is cached. No pass
    over the largest image to measure memory on CPUs, where nothing is measured."""
    return {
        "limit_mm_per_prompt": {"image": max(1, spec.max_images), "video": 0},
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": spec.device == "cpu",
    }


class ProcessedImages(NamedTuple):
    """Images of a prompt in the form of vLLM's processor."""

    items: MultiModalKwargsItems
    """Values that the model takes of them."""
    hashes: list[str]
    """Hash of each image, for vLLM's caches."""


class Prompts:
    """Makes prompts for one engine. llm: vLLM's. rule: image preprocessing of its model, if it takes images. Raises
    `SetupError` if this vLLM does not take what the model needs."""

    def __init__(self, llm: Llm, rule: ImageRule | None) -> None:
        self._renderer, self._rule = getattr(llm.llm_engine, "renderer", None), rule
        completes = rule is not None and rule.engine_inputs([rule.blank]) is not None
        if completes and not hasattr(self._renderer, "get_mm_processor"):
            raise SetupError("this release of vLLM takes no tiles of images", "pip install 'vllm==0.32.*'")
        self._last: tuple[Images, ProcessedImages | None] = ((), None)

    def of(self, ids: Int32[np.ndarray, " T"], images: Images) -> dict[str, object]:
        """A prompt with processed images: ids has as many placeholders as they have tokens."""
        if not images:
            return {"prompt_token_ids": ids.tolist()}
        assert self._rule is not None, "refused before the run starts"
        if self._last[0] is not images:  # the samples of a group come one after another, with the same ones
            self._last = images, self._processed(self._rule, images)
        processed = self._last[1]
        if processed is not None:
            return self._complete(self._rule, ids, images, processed)
        from PIL import Image

        # One placeholder an image, which vLLM's processor repeats itself.
        pil_images = [Image.fromarray(image) for image in images]
        return {
            "prompt_token_ids": self._rule.collapsed(ids, images).tolist(),
            "multi_modal_data": {"image": pil_images},
        }

    def _processed(self, rule: ImageRule, images: Images) -> ProcessedImages | None:
        """None if vLLM is to process them itself."""
        engine_inputs = rule.engine_inputs(images)
        if engine_inputs is None:
            return None
        from torch import from_numpy
        from transformers import BatchFeature
        from vllm.multimodal.inputs import MultiModalKwargsItems

        inputs = BatchFeature({name: from_numpy(values) for name, values in engine_inputs.items()})
        assert self._renderer is not None, "refused when the engine started"
        fields = self._renderer.get_mm_processor()._get_mm_fields_config(inputs, {})
        hashes = [hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest() for image in images]
        return ProcessedImages(MultiModalKwargsItems.from_hf_inputs(inputs, fields), hashes)

    def _complete(
        self, rule: ImageRule, ids: Int32[np.ndarray, " T"], images: Images, processed: ProcessedImages
    ) -> dict[str, object]:
        """A prompt that vLLM takes as it is."""
        from vllm.multimodal.inputs import PlaceholderRange

        counts = [rule.tokens(image.shape[1], image.shape[0]) for image in images]
        placeholders = [
            PlaceholderRange(start, count) for start, count in zip(rule.starts(ids, images), counts, strict=True)
        ]
        return {
            "type": "multimodal",
            "prompt_token_ids": ids.tolist(),
            "mm_kwargs": processed.items,
            "mm_hashes": {"image": processed.hashes},
            "mm_placeholders": {"image": placeholders},
        }
