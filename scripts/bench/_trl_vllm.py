"""TRL's colocated vLLM on a CPU: it needs other arguments to start there, and another way to take new weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch(dtype: str, kv_cache_bytes: int, params_of: Callable[[Any], Any] | None = None, *, on_cpu: bool) -> None:
    """Make TRL build its engine so, in this process. params_of: makes of TRL's sampling parameters those that its
    requests get, one for all or a list with one a request."""
    import trl.generation.vllm_generation as seam
    import vllm

    extra: dict[str, Any] = {"max_num_seqs": 256}
    if on_cpu:
        extra |= {
            "enforce_eager": True,
            "dtype": dtype,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "skip_tokenizer_init": True,
            "enable_chunked_prefill": False,
        }

    class Engine(vllm.LLM):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options | extra)

        def generate(self, prompts: Any, sampling_params: Any, **options: Any) -> Any:
            params = params_of(sampling_params) if params_of else sampling_params
            return super().generate(prompts, sampling_params=params, **options)

    seam.LLM = Engine
    if on_cpu:
        seam.VLLMGeneration.sync_weights = sync_weights


def sync_weights(generation: Any) -> None:
    """In place of `VLLMGeneration.sync_weights`: on CPUs vLLM loads weights once only, but reloads them."""
    weights = ((name, parameter.data) for name, parameter in generation.model.named_parameters())
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def repack(model: Any) -> None:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)

    generation.llm.apply_model(repack)
    generation.llm.reset_prefix_cache()
