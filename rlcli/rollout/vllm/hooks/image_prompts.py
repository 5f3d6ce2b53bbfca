"""Prompts with pictures, as vLLM takes them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlcli.errors import SetupError

if TYPE_CHECKING:
    from rlcli.images.image_rule import ImageRule
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


class Prompts:
    """Makes prompts for one engine. llm: vLLM's. rule: how its model sees pictures, if it does. Raises `SetupError` if
    this vLLM does not take what the model needs."""

    def __init__(self, llm: Any, rule: ImageRule | None) -> None:
        self._renderer, self._rule = getattr(llm.llm_engine, "renderer", None), rule
        completes = rule is not None and rule.engine_inputs([rule.blank]) is not None
        if completes and not hasattr(self._renderer, "get_mm_processor"):
            raise SetupError("this release of vLLM takes no tiles of pictures", "pip install 'vllm==0.32.*'")
        self._last: tuple[Sequence[Any], Any] = ((), None)

    def of(self, ids: Any, pictures: Sequence[Any]) -> dict[str, Any]:
        """A prompt with prepared pictures: ids has as many placeholders as they have tokens."""
        if not pictures:
            return {"prompt_token_ids": ids.tolist()}
        assert self._rule is not None, "refused before the run starts"
        if self._last[0] is not pictures:  # the samples of a group come one after another, with the same ones
            self._last = pictures, self._processed(self._rule, pictures)
        if self._last[1] is not None:
            return self._complete(self._rule, ids, *self._last)
        from PIL import Image

        # One placeholder a picture, which vLLM's processor repeats itself.
        images = [Image.fromarray(picture) for picture in pictures]
        return {"prompt_token_ids": self._rule.collapsed(ids, pictures).tolist(), "multi_modal_data": {"image": images}}

    def _processed(self, rule: ImageRule, pictures: Sequence[Any]) -> Any:
        """The images in the form of vLLM's processor, each with a hash; None if vLLM is to process them itself."""
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
        return MultiModalKwargsItems.from_hf_inputs(inputs, fields), hashes

    def _complete(self, rule: ImageRule, ids: Any, pictures: Sequence[Any], processed: Any) -> dict[str, Any]:
        """A prompt that vLLM takes as it is."""
        from vllm.multimodal.inputs import PlaceholderRange

        items, hashes = processed
        counts = [rule.tokens(picture.shape[1], picture.shape[0]) for picture in pictures]
        placeholders = [
            PlaceholderRange(*start_and_count)
            for start_and_count in zip(rule.starts(ids, pictures), counts, strict=True)
        ]
        return {
            "type": "multimodal",
            "prompt_token_ids": ids.tolist(),
            "mm_kwargs": items,
            "mm_hashes": {"image": hashes},
            "mm_placeholders": {"image": placeholders},
        }
