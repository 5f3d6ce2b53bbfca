"""Prompts with pictures, as vLLM takes them."""

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

    Pictures = Sequence[UInt8[np.ndarray, "height width 3"]]

NEVER = -100.0
"""Added to the logits of tokens that are not drawn; vLLM takes no less."""


def settings(spec: EngineSpec) -> dict[str, object]:
    """No cache of processed pictures: a picture is seen by the samples of one group, whose prefix is cached. No pass
    over the largest picture to measure memory on CPUs, where nothing is measured."""
    return {
        "limit_mm_per_prompt": {"image": max(1, spec.pictures), "video": 0},
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": spec.device == "cpu",
    }


class ProcessedPictures(NamedTuple):
    """Pictures of a prompt in the form of vLLM's processor."""

    items: MultiModalKwargsItems
    """What the model takes of them."""
    hashes: list[str]
    """Hash of each picture, for vLLM's caches."""


class Prompts:
    """Makes prompts for one engine. llm: vLLM's. rule: how its model sees pictures, if it does. Raises `SetupError` if
    this vLLM does not take what the model needs."""

    def __init__(self, llm: Llm, rule: ImageRule | None) -> None:
        self._renderer, self._rule = getattr(llm.llm_engine, "renderer", None), rule
        completes = rule is not None and rule.engine_inputs([rule.blank]) is not None
        if completes and not hasattr(self._renderer, "get_mm_processor"):
            raise SetupError("this release of vLLM takes no tiles of pictures", "pip install 'vllm==0.32.*'")
        self._last: tuple[Pictures, ProcessedPictures | None] = ((), None)

    def of(self, ids: Int32[np.ndarray, " T"], pictures: Pictures) -> dict[str, object]:
        """A prompt with prepared pictures: ids has as many placeholders as they have tokens."""
        if not pictures:
            return {"prompt_token_ids": ids.tolist()}
        assert self._rule is not None, "refused before the run starts"
        if self._last[0] is not pictures:  # the samples of a group come one after another, with the same ones
            self._last = pictures, self._processed(self._rule, pictures)
        processed = self._last[1]
        if processed is not None:
            return self._complete(self._rule, ids, pictures, processed)
        from PIL import Image

        # One placeholder a picture, which vLLM's processor repeats itself.
        images = [Image.fromarray(picture) for picture in pictures]
        return {"prompt_token_ids": self._rule.collapsed(ids, pictures).tolist(), "multi_modal_data": {"image": images}}

    def _processed(self, rule: ImageRule, pictures: Pictures) -> ProcessedPictures | None:
        """None if vLLM is to process them itself."""
        engine_inputs = rule.engine_inputs(pictures)
        if engine_inputs is None:
            return None
        from torch import from_numpy
        from transformers import BatchFeature
        from vllm.multimodal.inputs import MultiModalKwargsItems

        inputs = BatchFeature({name: from_numpy(values) for name, values in engine_inputs.items()})
        assert self._renderer is not None, "refused when the engine started"
        fields = self._renderer.get_mm_processor()._get_mm_fields_config(inputs, {})
        hashes = [hashlib.blake2b(picture.tobytes(), digest_size=16).hexdigest() for picture in pictures]
        return ProcessedPictures(MultiModalKwargsItems.from_hf_inputs(inputs, fields), hashes)

    def _complete(
        self, rule: ImageRule, ids: Int32[np.ndarray, " T"], pictures: Pictures, processed: ProcessedPictures
    ) -> dict[str, object]:
        """A prompt that vLLM takes as it is."""
        from vllm.multimodal.inputs import PlaceholderRange

        counts = [rule.tokens(picture.shape[1], picture.shape[0]) for picture in pictures]
        placeholders = [
            PlaceholderRange(*start_and_count)
            for start_and_count in zip(rule.starts(ids, pictures), counts, strict=True)
        ]
        return {
            "type": "multimodal",
            "prompt_token_ids": ids.tolist(),
            "mm_kwargs": processed.items,
            "mm_hashes": {"image": processed.hashes},
            "mm_placeholders": {"image": placeholders},
        }
