"""Arguments of vLLM's engine and server, and its environment variables, from an `EngineSpec`.

Nothing here starts an engine or touches a device, so that tests can resolve these arguments against any release.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from rlcli.errors import SetupError
from rlcli.model.io.model_config import engine_keys, has_recurrent_layers, is_latent
from rlcli.model.io.mxfp4 import quantization
from rlcli.rollout.engine import EngineSpec
from rlcli.rollout.vllm.hooks import expert_kernels, image_prompts, speculation

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

QUANTIZED = {"fp8": "fp8_per_tensor"}
"""vLLM's names of the methods that quantise whole weights as they are loaded, at each sync too. (Its `fp8` is for
checkpoints that are quantised already: releases before 0.32 accept it for this too, later ones refuse.)"""

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
"""Linear layers of decoders, under the names of checkpoints and of vLLM. A mixture's experts have none of them."""
LINEAR_ATTENTION = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj")
"""Linear layers of gated DeltaNet layers, likewise."""

CPU_BATCHED_TOKENS = 4096
GPU_BATCHED_TOKENS = 8192
"""Most tokens of a prefill. vLLM's own default depends on the GPU; `rlcli plan` needs a fixed one."""

PLAIN = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Given with each request: a server may take what is missing from the model's generation config."""

NO_SHARE = 0.01
"""Share of the GPU's memory if the cache's size is given: vLLM would start only if the whole share is free."""

CPU_BLOCK = 32
"""Tokens in a block of the KV cache on CPUs. vLLM's default is 128, but each response takes whole blocks, and only
whole blocks of a prompt are shared by its samples."""


def engine_arguments(spec: EngineSpec) -> dict[str, object]:
    """Arguments of vLLM's `LLM`, which are those of its `EngineArgs`, for `VllmEngine`. Raises `SetupError` for drafts
    that the installed vLLM cannot verify."""
    keys = engine_keys(spec.model) | ({"head_dtype": "float32"} if spec.float_head else {})
    overrides: Mapping[str, object] | Callable[[PreTrainedConfig], PreTrainedConfig] = keys
    if spec.weights_follow and quantization(spec.model):
        overrides = partial(unquantized, keys)
    return {
        **_shared_arguments(spec),
        # Random weights would also replace how a vision-language model normalises them, which no sync sends.
        "load_format": "dummy" if spec.weights_follow and spec.image_rule is None else "auto",
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": spec.tensor_parallel,
        **(image_prompts.settings(spec) if spec.image_rule is not None else {"skip_tokenizer_init": True}),
        "enable_lora": spec.lora_rank > 0,
        "max_lora_rank": _allowed_rank(spec.lora_rank),
        "max_loras": 1,
        "lora_target_modules": adapted_layers(spec.lora_targets),
        **({"enable_mixed_moe_lora_format": True} if spec.lora_experts else {}),
        "disable_log_stats": True,
        **({"async_scheduling": False} if spec.exact_steps or (spec.routes and spec.device == "cpu") else {}),
        **(speculation.settings(spec.speculate) if spec.speculate else {}),
        **({"hf_overrides": overrides} if overrides else {}),
    }


def unquantized(overrides: Mapping[str, object], config: PreTrainedConfig) -> PreTrainedConfig:
    """vLLM's configuration of a model whose files are in MXFP4, for weights that are sent in bfloat16."""
    config.update(overrides)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def server_arguments(spec: EngineSpec) -> list[str]:
    """Command-line arguments of vLLM's own server for what `VllmEngine` sets, without adapters. One more response fits
    than is sent to it, so that the question whether it still generates does not wait. Raises `SetupError` for a run
    whose model is in MXFP4: a server of it would take no other weights."""
    if spec.weights_follow and quantization(spec.model):
        raise SetupError(
            f"rollout.servers: the weights of {spec.model} are in MXFP4, and servers are started for the weights of a "
            "run, in bfloat16",
            "give rollout.engine = vllm, or a copy of the model in bfloat16",
        )
    settings = _shared_arguments(spec) | {
        "load_format": "dummy" if spec.weights_follow else "auto",
        "max_num_seqs": spec.max_concurrent + 1,
        "skip_tokenizer_init": True,
        "hf_overrides": engine_keys(spec.model) or None,
    }
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def environment_variables(spec: EngineSpec) -> dict[str, str]:
    """Variables that vLLM reads in the process of its engine."""
    if spec.device == "cpu":
        return {}
    # See `_on_gpu`.
    shared = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
    # The second model runner verifies drafts by its own rule, and has no place for `speculation.Verifier`.
    drafting = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    return (shared if spec.tensor_parallel > 1 else {}) | (drafting if spec.speculate else {})


def _shared_arguments(spec: EngineSpec) -> dict[str, object]:
    """Arguments of both an engine in the worker's process and a server."""
    return {
        "model": spec.model,
        "dtype": spec.dtype,
        "quantization": QUANTIZED[spec.quantization] if spec.quantization else None,
        "max_model_len": spec.max_length,
        "max_num_seqs": spec.max_concurrent,
        "kv_cache_memory_bytes": spec.kv_cache_bytes,
        "enforce_eager": spec.enforce_eager or spec.device == "cpu",
        # Between blocks of a prefix cache vLLM has to stop at the state that a layer carries, and so to prefill in
        # pieces, which it does not on CPUs.
        "enable_prefix_caching": spec.device != "cpu" or not has_recurrent_layers(spec.model),
        **(_on_cpu(spec) if spec.device == "cpu" else _on_gpu(spec)),
        "logprobs_mode": "processed_logprobs",
        "seed": 0,
    }


def _on_cpu(spec: EngineSpec) -> dict[str, object]:
    """No prompt is prefilled in pieces: for each unfinished piece vLLM rewinds the random generator, which CPU
    generators cannot do (`CPU Generator does not use offset`)."""
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, spec.max_length, spec.max_concurrent * (1 + spec.speculate)),
        "block_size": CPU_BLOCK,
        # Of its two kernels for latent attention vLLM takes that of AMX where there is one, which knows bfloat16 alone.
        **({"attention_backend": "CPU_MLA"} if is_latent(spec.model) else {}),
        "gpu_memory_utilization": spec.gpu_memory_utilization,
    }


def _on_gpu(spec: EngineSpec) -> dict[str, object]:
    """Ray shows each worker only its own GPU. vLLM's all-reduces that write into each other's memory look for the
    others' GPUs among those that this process sees, and fail: NCCL is used instead. So does the pass of its compiler
    that fuses an all-reduce with the norm after it, which is on by default on Hopper and Blackwell."""
    single_gpu = spec.tensor_parallel == 1
    return {
        "enable_sleep_mode": spec.sleep != "none",
        **({"enable_return_routed_experts": True} if spec.routes else {}),
        "max_num_batched_tokens": max(GPU_BATCHED_TOKENS, spec.max_concurrent * (1 + spec.speculate)),
        "disable_custom_all_reduce": not single_gpu,
        **({} if single_gpu else {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}),
        **({} if spec.quantization else expert_kernels.ARGUMENTS),
        "gpu_memory_utilization": spec.gpu_memory_utilization if spec.kv_cache_bytes is None else NO_SHARE,
    }


def _allowed_rank(rank: int) -> int:
    """The smallest rank that vLLM's LoRA kernels are built for and that is at least `rank`."""
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def adapted_layers(targets: str) -> list[str]:
    """Last parts of the names of the layers that vLLM prepares for an adapter, by `lora.targets`. Asked for nothing, it
    prepares head and embedding of Llama's and Qwen3's models too: each step computes more for them, and on CPUs prompt
    log-probs fail in such a head, which takes one row for each request.

    >>> adapted_layers("q_proj, experts")
    ['q_proj', 'experts']
    """
    names = [name.strip() for name in targets.split(",")]
    every = (*ALL_LINEAR, *LINEAR_ATTENTION)
    return [layer for name in names for layer in (every if name == "all-linear" else (name,))]
