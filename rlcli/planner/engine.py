"""Memory that vLLM holds: weights, KV cache, CUDA graphs and the activations of its forward passes."""

from __future__ import annotations

import math

from rlcli.planner.setting import Parts, Setting

CPU_BATCHED_TOKENS = 4096
GPU_BATCHED_TOKENS = 8192
"""Maximum tokens of a prefill, as set by `rlcli.rollout.vllm_engine`."""

SAMPLER_COPIES = 3
"""Float32 tensors of [requests, vocabulary] that sampling holds at once: logits, their log-softmax, and noise."""


def engine_parts(setting: Setting, *, idle: bool = False) -> Parts:
    """Memory of one rank's engine. idle: awake, but not generating."""
    parts = {"engine's weights": weights(setting), "KV cache": kv_cache(setting)}
    if not setting.device.is_cpu:
        parts["CUDA graphs"] = graphs(setting)
        working = {} if idle else {"engine's activations": activations(setting)}
        return parts | working | {"engine's rest": rest(setting)}
    return parts if idle else parts | {"engine's activations": activations(setting)}


def asleep_bytes(setting: Setting) -> Parts:
    """Memory of the engine while the trainer computes: on CPUs, where it does not sleep, everything."""
    if not setting.hosts_engine:
        return {}
    if setting.device.is_cpu:
        return engine_parts(setting, idle=True)
    return {"CUDA graphs": graphs(setting), "engine's rest": rest(setting)}


def weights(setting: Setting) -> float:
    """Weights of one rank. On CPUs vLLM keeps the head twice: plain and in its own layout."""
    shape, shared = setting.policy, setting.config.rollout.tensor_parallel
    if setting.device.is_cpu:
        return setting.bytes_each * (shape.parameters + shape.embedding_parameters) / shared
    each = 1 if setting.config.rollout.quantization == "fp8" else setting.bytes_each
    rest = shape.parameters - shape.all_layer_parameters
    return (each * shape.all_layer_parameters + setting.bytes_each * rest) / shared


def kv_per_token(setting: Setting) -> float:
    """KV cache bytes of a token on one rank."""
    shape, shared = setting.policy, setting.config.rollout.tensor_parallel
    return shape.kv_bytes_per_token(setting.bytes_each) * max(1 / shared, 1 / shape.kv_heads)


def kv_cache(setting: Setting) -> float:
    """KV cache of one rank: given, or what gpu_memory_utilization leaves besides the rest."""
    if setting.kv_cache_bytes is not None:
        return float(setting.kv_cache_bytes)
    taken = weights(setting) + activations(setting) + graphs(setting) + rest(setting)
    return max(setting.config.rollout.gpu_memory_utilization * setting.device.memory - taken, 0.0)


def graphs(setting: Setting) -> float:
    if setting.device.is_cpu or setting.config.rollout.enforce_eager:
        return 0.0
    assumed = setting.device.constants
    return assumed.graphs + assumed.graphs_per_layer * setting.policy.layers


def rest(setting: Setting) -> float:
    """Bytes besides the graphs: buffers and libraries."""
    return setting.device.constants.engine_rest


def activations(setting: Setting) -> float:
    """The larger of a prefill and of sampling for all concurrent requests."""
    shape, rollout, each = setting.policy, setting.config.rollout, setting.bytes_each
    on_cpu = setting.device.is_cpu
    samples = math.ceil(setting.config.groups_at_once * rollout.samples_per_prompt / setting.engines)
    asked = min(rollout.max_concurrent, samples)
    most = max(CPU_BATCHED_TOKENS, setting.max_length) if on_cpu else GPU_BATCHED_TOKENS
    tokens = min(most, asked * setting.prompt_tokens) if on_cpu else most
    # Gate and up in one, and their product; queries, keys, values; hidden states.
    prefill = tokens * each * (3 * shape.passed + shape.query + 2 * shape.key + 3 * shape.hidden)
    rows = (asked if on_cpu else rollout.max_concurrent) * (1 + rollout.speculate)
    sampling = SAMPLER_COPIES * 4 * rows * shape.vocab
    return max(prefill / (1 if on_cpu else rollout.tensor_parallel), sampling)


def full_responses(setting: Setting) -> float:
    """How many samples of maximum length the KV cache of one engine holds at once."""
    return kv_cache(setting) / (kv_per_token(setting) * setting.max_length)
