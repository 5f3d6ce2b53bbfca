"""Memory that vLLM holds: weights, KV cache, CUDA graphs and the activations of its forward passes."""

from __future__ import annotations

import math

from rlcli.config.schema import RunConfig
from rlcli_planner.model_shape import ModelShape
from rlcli_planner.plan_input import Parts, RunPlanInput

CPU_BATCHED_TOKENS = 4096
GPU_BATCHED_TOKENS = 8192
"""Maximum tokens of a prefill, as set by `rlcli.rollout.vllm.vllm_arguments`."""

CPU_BLOCK = 32
"""Tokens of a block of the KV cache on CPUs, as set by `rlcli.rollout.vllm.vllm_arguments`."""
MIN_KV_CACHE, MAX_KV_CACHE = 64 << 20, 4 << 30
"""Bytes of a KV cache on CPUs that is sized to the workload."""

COUNT = 4
"""Bytes of a count of tokens."""

SAMPLER_COPIES = 3
"""Float32 tensors of [requests, vocabulary] that sampling holds at once: logits, their log-softmax, and noise."""


def engine_parts(setting: RunPlanInput, *, idle: bool = False) -> Parts:
    """Memory of one rank's engine. idle: awake, but not generating."""
    parts = {"engine's weights": weights(setting), "KV cache": kv_cache(setting)}
    if not setting.device.is_cpu:
        parts |= {"sampler's state": sampler_state(setting), "CUDA graphs": graphs(setting)}
        working = {} if idle else {"engine's activations": activations(setting)}
        return parts | working | {"engine's rest": rest(setting)}
    return parts if idle else parts | {"engine's activations": activations(setting)}


def asleep_bytes(setting: RunPlanInput) -> Parts:
    """Memory of the engine while the trainer computes: on CPUs, where it does not sleep, everything. With
    `rollout.sleep = auto` it releases all that it can, if need be."""
    if not setting.hosts_engine:
        return {}
    if setting.device.is_cpu or setting.config.rollout.sleep == "none":
        return engine_parts(setting, idle=True)
    parts = {"CUDA graphs": graphs(setting), "engine's rest": rest(setting)}
    if setting.config.rollout.sleep == "cache":
        return parts | {"engine's weights": weights(setting), "sampler's state": sampler_state(setting)}
    return parts


def weights(setting: RunPlanInput) -> float:
    """Weights of one rank. On CPUs vLLM keeps the head twice: plain and in its own layout."""
    shape, shared = setting.policy, setting.config.rollout.tensor_parallel
    if setting.device.is_cpu:
        return setting.bytes_each * (shape.parameters + shape.embedding_parameters) / shared
    each = 1 if setting.config.rollout.quantization == "fp8" else setting.bytes_each
    rest = shape.parameters - shape.all_layer_parameters
    return (each * shape.all_layer_parameters + setting.bytes_each * rest) / shared


def sampler_state(setting: RunPlanInput) -> float:
    """Penalty state of vLLM's second model runner for each concurrent request, allocated even without penalties: an
    int32 count of each token of the vocabulary, and one bit for tokens of the prompt. It is in the memory pool of the
    weights, and is released with them. Speculative decoding uses the first runner, which has no such state."""
    rollout = setting.config.rollout
    if setting.device.is_cpu or rollout.speculate:
        return 0.0
    return rollout.max_concurrent * setting.policy.vocab * (COUNT + 1 / 8)


def reloading(setting: RunPlanInput) -> float:
    """Peak bytes of a weight sync within vLLM on a GPU: it loads module by module, into new memory, and copies
    that into the weights once a module is complete. The largest is the embedding, or a layer's experts."""
    shape = setting.policy
    if setting.device.is_cpu or not setting.hosts_engine or setting.separate_adapter:
        return 0.0
    inner = shape.experts * shape.expert_parameters if shape.experts else 2 * shape.hidden * shape.intermediate
    return setting.bytes_each * max(shape.embedding_parameters, inner) / setting.config.rollout.tensor_parallel


def kv_per_token(setting: RunPlanInput) -> float:
    """KV cache bytes of a token on one rank."""
    shape, shared = setting.policy, setting.config.rollout.tensor_parallel
    heads = 1 if shape.latent is not None else shape.kv_heads  # what is compressed is for all heads
    return shape.kv_bytes_per_token(setting.bytes_each) * max(1 / shared, 1 / heads)


def sample_bytes(setting: RunPlanInput, tokens: float) -> float:
    """KV cache bytes of a sample of `tokens` tokens on one rank, with the states of linear attention."""
    shape = setting.policy
    if shape.delta is None:
        return kv_per_token(setting) * tokens
    return kv_per_token(setting) * _held_tokens(shape, setting.bytes_each, tokens)


def _held_tokens(shape: ModelShape, bytes_each: float, tokens: float) -> float:
    """Tokens of the KV cache that a sample takes. vLLM gives all layers blocks of one size, so that a block of a layer
    with linear attention holds its state, and one with full attention as many tokens as have room there. Layers of
    linear attention have blocks in groups of as many as attend."""
    a_block = block_tokens(shape, bytes_each)
    return a_block * (math.ceil(tokens / a_block) + _state_blocks(shape))


def block_tokens(shape: ModelShape, bytes_each: float) -> int:
    """Tokens in a block of the KV cache on CPUs."""
    if shape.delta is None:
        return CPU_BLOCK
    held = shape.delta.state_bytes(bytes_each)
    return CPU_BLOCK * math.ceil(held / (CPU_BLOCK * 2 * shape.key * bytes_each))


def kv_cache(setting: RunPlanInput) -> float:
    """KV cache bytes of one rank: the configured size, or the rest of what gpu_memory_utilization allows."""
    if setting.kv_cache_bytes is not None:
        return float(setting.kv_cache_bytes)
    other_bytes = weights(setting) + sampler_state(setting) + activations(setting) + graphs(setting) + rest(setting)
    return max(setting.config.rollout.gpu_memory_utilization * setting.device.memory - other_bytes, 0.0)


def graphs(setting: RunPlanInput) -> float:
    """Bytes of CUDA graphs."""
    if setting.device.is_cpu or setting.config.rollout.enforce_eager:
        return 0.0
    assumed = setting.device.constants
    return assumed.graphs + assumed.graphs_per_layer * setting.policy.layers


def rest(setting: RunPlanInput) -> float:
    """Bytes of vLLM's buffers and libraries, without the graphs."""
    return setting.device.constants.engine_rest


def activations(setting: RunPlanInput) -> float:
    """Bytes of activations: the larger of a prefill and of sampling for all concurrent requests."""
    shape, rollout, each = setting.policy, setting.config.rollout, setting.bytes_each
    on_cpu = setting.device.is_cpu
    samples = math.ceil(setting.config.groups_at_once * rollout.samples_per_prompt / setting.engines)
    requests = min(rollout.max_concurrent, samples)
    batched_tokens = max(CPU_BATCHED_TOKENS, setting.max_length) if on_cpu else GPU_BATCHED_TOKENS
    tokens = min(batched_tokens, requests * setting.prompt_tokens) if on_cpu else batched_tokens
    # Gate and up in one, and their product; queries, keys, values; hidden states.
    prefill = tokens * each * (3 * shape.passed + shape.query + 2 * shape.key + 3 * shape.hidden)
    rows = (requests if on_cpu else rollout.max_concurrent) * (1 + rollout.speculate)
    sampling = SAMPLER_COPIES * 4 * rows * shape.vocab
    return max(prefill / (1 if on_cpu else rollout.tensor_parallel), sampling)


def full_responses(setting: RunPlanInput) -> float:
    """Number of samples of the longest possible length with these prompts that an engine's KV cache holds."""
    return kv_cache(setting) / sample_bytes(setting, setting.longest)


def holds_longest(setting: RunPlanInput) -> bool:
    """True if the KV cache holds one sample of the length that the configuration allows; else vLLM does not start."""
    return kv_cache(setting) >= sample_bytes(setting, setting.max_length)


def workload_cache(config: RunConfig, shape: ModelShape, bytes_each: int, longest: int) -> int:
    """Bytes of an engine's KV cache on a CPU that holds all samples of a step at once, up to MAX_KV_CACHE.

    longest: tokens of the longest sample that the run's prompts allow. One of the length that the configuration allows
    fits in any case.
    """
    rollout = config.rollout
    engines = config.engine_workers // rollout.tensor_parallel
    samples = max(config.groups_at_once * rollout.samples_per_prompt // engines, 1)
    size = block_tokens(shape, bytes_each)
    a_block = size * int(shape.kv_bytes_per_token(bytes_each))
    each = math.ceil((longest + rollout.speculate) / size) + _state_blocks(shape)
    wanted = each * min(rollout.max_concurrent, samples) * a_block * 5 // 4
    return max(MIN_KV_CACHE, smallest_cache(config, shape, bytes_each), min(MAX_KV_CACHE, wanted))


def smallest_cache(config: RunConfig, shape: ModelShape, bytes_each: int) -> int:
    """Bytes of a KV cache on a CPU that holds one sample of the length that the configuration allows, with a block to
    spare."""
    size = block_tokens(shape, bytes_each)
    blocks = math.ceil((config.max_length + config.rollout.speculate) / size) + _state_blocks(shape) + 1
    return blocks * size * int(shape.kv_bytes_per_token(bytes_each))


def _state_blocks(shape: ModelShape) -> int:
    """Blocks of the KV cache that hold a sample's states of linear attention."""
    return math.ceil(shape.delta.layers / shape.attention_layers) if shape.delta is not None else 0
