"""Sizes of tiny models of other families than Qwen's (`rlcli tiny-model --kind`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlcli.errors import ConfigError
from rlcli.registry import near

CHOSEN = 2
"""Experts that a token passes through."""
EXPERTS = 8
"""Experts of each layer, by default."""
LATENT_KEYS, ROTATED = 512, 64
"""Width of compressed keys and values, and of a key's rotated part: vLLM's CPU kernel takes these alone."""
FULL_EVERY = 4
"""Period of full attention in a hybrid model: each fourth layer has it, and the last one; the others are linear."""
LINEAR_HEAD = 64
"""Size of a head of linear attention: one that vLLM's kernels take."""

Values = Mapping[str, Any]


def _latent(common: Values, experts: int) -> dict[str, Any]:
    """Multi-head latent attention, shared experts, a router with a bias; the first of several layers is dense."""
    return {
        "num_key_value_heads": common["num_attention_heads"],
        "q_lora_rank": common["hidden_size"] // 2,
        "kv_lora_rank": LATENT_KEYS,
        "qk_rope_head_dim": ROTATED,
        "qk_nope_head_dim": ROTATED,
        "v_head_dim": 32,
        "n_shared_experts": 1,
        "n_routed_experts": experts,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": common["hidden_size"],
        "n_group": 1,
        "topk_group": 1,
    }


def _deepseek_v3(common: Values, experts: int) -> dict[str, Any]:
    grouped = {"n_group": 2} if experts % 2 == 0 and experts >= 2 * CHOSEN else {}
    return {**_latent(common, experts), "first_k_dense_replace": min(1, common["num_hidden_layers"] - 1), **grouped}


def _glm4_moe_lite(common: Values, experts: int) -> dict[str, Any]:
    layers = common["num_hidden_layers"]
    dense = min(1, layers - 1)
    return {**_latent(common, experts), "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense)}


def _gpt_oss(common: Values, experts: int) -> dict[str, Any]:
    """Attention with sinks, in every other layer within a window; experts and router with biases."""
    return {
        "head_dim": common["hidden_size"] // common["num_attention_heads"],
        "intermediate_size": common["hidden_size"],
        "num_local_experts": experts,
        "num_experts_per_tok": CHOSEN,
        "sliding_window": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": common["max_position_embeddings"] // 4,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    }


def _linear(common: Values) -> dict[str, Any]:
    """Layers of gated DeltaNet, and of attention to all tokens."""
    layers = common["num_hidden_layers"]
    if layers < 2:
        raise ConfigError(f"--layers = {layers}: such a model has layers of two kinds", "give --layers 2 or more")
    full = [(layer + 1) % FULL_EVERY == 0 or layer + 1 == layers for layer in range(layers)]
    return {
        "head_dim": common["hidden_size"] // common["num_attention_heads"],
        "layer_types": ["full_attention" if attends else "linear_attention" for attends in full],
        "linear_num_key_heads": common["num_key_value_heads"],
        "linear_num_value_heads": common["num_attention_heads"],
        "linear_key_head_dim": LINEAR_HEAD,
        "linear_value_head_dim": LINEAR_HEAD,
    }


def _qwen3_5(common: Values, experts: int) -> dict[str, Any]:
    return {**_linear(common), "tie_word_embeddings": True}


def _qwen3_5_moe(common: Values, experts: int) -> dict[str, Any]:
    return {**_qwen3_next(common, experts), "tie_word_embeddings": True}


def _qwen3_next(common: Values, experts: int) -> dict[str, Any]:
    """With a shared expert."""
    return {
        **_linear(common),
        "num_experts": experts,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": common["hidden_size"],
        "shared_expert_intermediate_size": common["hidden_size"],
    }


KINDS: dict[str, Callable[[Values, int], dict[str, Any]]] = {
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "gpt_oss": _gpt_oss,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_next": _qwen3_next,
}
"""By kind: of the values that all tiny models have, and the number of experts, what else is in the config."""
MODEL_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""The `model_type` of kinds whose name is another one."""
DENSE = ("qwen3_5",)
"""Kinds without experts."""


def family_config(kind: str, common: Values, experts: int) -> Any:
    """The configuration of a tiny model of this kind, with `experts` in each layer that has some (0: as many as
    usual). Raises `ConfigError` for another kind."""
    from transformers import AutoConfig

    if kind not in KINDS:
        raise ConfigError(f"--kind = {kind}: no tiny model of this kind is made", near(kind, tuple(KINDS)))
    if kind in DENSE and experts:
        raise ConfigError(f"--experts = {experts}: a {kind} has none", "leave it out")
    own = KINDS[kind](common, experts or EXPERTS)
    return AutoConfig.for_model(MODEL_TYPES.get(kind, kind), **{**common, "tie_word_embeddings": False, **own})
