"""The parts of vLLM's objects that rlcli uses: the type checker does not follow vLLM's own annotations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeGuard, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch
    from jaxtyping import Float, Int32, Int64
    from torch import Tensor, nn
    from transformers import PreTrainedConfig
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.outputs import LogprobsTensors

T = TypeVar("T")


# Outputs.


class TokenLogProb(Protocol):
    """Log-prob of one token."""

    logprob: float
    """In nats."""


class FlatLogProbs(Protocol):
    """Log-probs of a response, with `flat_logprobs`."""

    logprobs: Sequence[float]
    """One log-prob per token: only that of the token itself is requested."""


class CompletionOutput(Protocol):
    """Response of a request, finished or not. Some releases add `routed_experts`."""

    token_ids: Sequence[int]
    """Ids of the response."""
    logprobs: FlatLogProbs
    """Log-probs of these."""
    finish_reason: str | None
    """None if it is not finished."""


class RequestOutput(Protocol):
    """Output of one request in a step of the engine."""

    request_id: str
    """Name under which it was added."""
    finished: bool
    """True if this is its last output."""
    prompt_token_ids: Sequence[int]
    """Ids of the prompt."""
    outputs: Sequence[CompletionOutput]
    """One for each response."""
    num_cached_tokens: int | None
    """Prompt tokens from the prefix cache."""
    prompt_logprobs: Sequence[Mapping[int, TokenLogProb]]
    """At each prompt token, by id, if they were asked for; of the first there are none."""


class RequestState(Protocol):
    """State of a running request. Some releases add `routed_experts_chunks`."""

    external_req_id: str
    """Name under which the request was added."""
    prompt_len: int
    """Tokens of the prompt."""

    def _new_completion_output(self, token_ids: list[int], finish_reason: None, stop_reason: None) -> CompletionOutput:
        """The response so far."""
        ...


# Configuration.


class ModelConfig(Protocol):
    """Config of the model."""

    hf_config: PreTrainedConfig
    """transformers' config."""
    hf_text_config: PreTrainedConfig
    """The part of it about the text decoder."""

    @property
    def head_dtype(self) -> torch.dtype:
        """Dtype in which the logits are computed."""
        ...

    def get_num_experts(self) -> int:
        """Experts of each layer."""
        ...


class CacheConfig(Protocol):
    """Config of the KV cache."""

    block_size: int
    """Tokens of a block."""
    num_gpu_blocks: int
    """Blocks of the cache."""


class VllmConfig(Protocol):
    """Config of an engine."""

    model_config: ModelConfig
    """Config of the model."""
    cache_config: CacheConfig
    """Config of the KV cache."""


# The worker, as functions see it that `collective_rpc` calls.


class BlockTable(Protocol):
    """Blocks of the requests of a batch, for one group of caches."""

    block_size: int
    """Tokens of a block."""

    def get_numpy_array(self) -> Int32[np.ndarray, "requests blocks"]:
        """Number of each request's blocks, in their order."""
        ...


class BlockTables(Protocol):
    """Block tables of all groups of caches."""

    def __getitem__(self, group: int) -> BlockTable: ...


class InputBatch(Protocol):
    """Requests of a step, in vLLM's first model runner."""

    req_ids: Sequence[str]
    """Name of each request."""
    req_id_to_index: Mapping[str, int]
    """Row of each request."""
    num_tokens_no_spec: Int32[np.ndarray, " rows"]
    """Tokens of each row, drafts left out."""
    block_table: BlockTables
    """Blocks of each row."""


class Sampler(Protocol):
    """Samples tokens from logits."""

    gather_logprobs: Callable[[Float[Tensor, "B V"], int, Int64[Tensor, " B"]], LogprobsTensors]
    """Log-probs of the given tokens and of the likeliest ones, and ranks."""


class CachedRequest(Protocol):
    """A request, as the model runner keeps it."""

    sampling_params: SamplingParams
    """Its sampling parameters."""


class RejectionSampler(Protocol):
    """Verifies drafts."""

    forward: Callable[..., object]
    """`rlcli.rollout.vllm.hooks.speculation.Verifier`, once that is installed."""


class ModelRunner(Protocol):
    """vLLM's first model runner."""

    device: torch.device
    """Device of the model."""
    sampler: Sampler
    """Samples the next tokens."""
    rejection_sampler: RejectionSampler
    """Verifies drafts; exists with `speculative_config` only."""
    input_batch: InputBatch
    """Requests of the step."""
    requests: Mapping[str, CachedRequest]
    """All requests by name."""

    def get_model(self) -> nn.Module:
        """The model."""
        ...


class Worker(Protocol):
    """One rank of an engine."""

    model_runner: ModelRunner
    """Runs the model."""
    vllm_config: VllmConfig
    """Config of the engine."""


# The engine.


class OutputProcessor(Protocol):
    """Collects the outputs of requests."""

    request_states: Mapping[str, RequestState]
    """Running requests by vLLM's own id."""


class EngineCore(Protocol):
    """Scheduler and workers."""

    def shutdown(self) -> None:
        """End them."""
        ...


class LlmEngine(Protocol):
    """vLLM's `LLMEngine`. Some releases add `renderer`."""

    vllm_config: VllmConfig
    """Its config."""
    output_processor: OutputProcessor
    """Collects outputs."""
    engine_core: EngineCore
    """Generates."""

    def add_request(
        self,
        request_id: str,
        prompt: Mapping[str, object],
        params: SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
    ) -> object:
        """Queue a request."""
        ...

    def abort_request(self, request_ids: list[str]) -> None:
        """Remove requests."""
        ...

    def step(self) -> Sequence[RequestOutput]:
        """Generate a token for each scheduled request."""
        ...

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter."""
        ...

    def reset_encoder_cache(self) -> None:
        """Forget the features of images."""
        ...

    def is_sleeping(self) -> bool:
        """True if its memory is released."""
        ...


class Llm(Protocol):
    """vLLM's `LLM`."""

    llm_engine: LlmEngine
    """Its engine."""

    def apply_model(self, func: Callable[[nn.Module], T]) -> list[T]:
        """Call a function with the model of each worker."""
        ...

    def collective_rpc(
        self, method: str | Callable[[Worker], T], *, kwargs: Mapping[str, object] | None = None
    ) -> list[T]:
        """Call a method of each worker by its name, or a function with each worker."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Drop the prefix cache; False, without effect, if requests run."""
        ...

    def sleep(self, level: int) -> None:
        """Release memory: 1 keeps the weights on the host, 2 drops them."""
        ...

    def wake_up(self, tags: list[str]) -> None:
        """Allocate memory again."""
        ...


# Parts of models.


class CustomOp(Protocol):
    """A layer that computes by a method which it looks up when it is built."""

    _forward_method: Callable[..., object]
    """Computes its result."""


class Multimodal(Protocol):
    """A model with a vision encoder."""

    def get_language_model(self) -> nn.Module:
        """Its text decoder."""
        ...


def is_custom_op(layer: nn.Module) -> TypeGuard[CustomOp]:
    """True if the computation of this layer can be replaced."""
    return hasattr(layer, "_forward_method")


def is_multimodal(model: nn.Module) -> TypeGuard[Multimodal]:
    """True if this model has a vision encoder."""
    return bool(getattr(model, "supports_multimodal", False))
