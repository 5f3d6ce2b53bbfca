"""Reads a model's config.json and checks that the model can be trained here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcli.errors import ModelError
from rlcli.images.families import KINDS as VISION_KINDS
from rlcli.registry import near
from rlcli.support.reading import check_model_folder, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SUPPORTED = (
    *("gemma3_text", "glm4", "glm4_moe", "llama", "mistral", "mixtral", "olmo2", "olmo3", "phi3"),
    *("qwen2", "qwen3", "qwen3_moe", "smollm3"),
    *("deepseek_v3", "glm4_moe_lite"),
    "gpt_oss",
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
"""`model_type`s whose packed log-probs are tested against their own padded forward pass; `VISION_KINDS` are others."""
SEPARATE_HEAD = ("glm4_moe", "qwen3_next", "deepseek_v3", "glm4_moe_lite", "gpt_oss")
"""Models whose head is never their embedding in vLLM."""
WINDOWED = ("gemma3_text", "mistral", "olmo3", "phi3", "gpt_oss")
"""Models whose sliding windows are tested, too."""
RECURRENT = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Text models with layers of linear attention, which carry a state from token to token."""
LINEAR_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
"""Sizes of these layers in config.json."""
LATENT = ("deepseek_v3", "glm4_moe_lite")
"""Models whose attention compresses keys and values (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434)."""

REFUSED = {
    "gemma3": "an image's tokens see those that follow them",
    **dict.fromkeys(
        ("gemma4", "gemma4_text"), "its heads are of two sizes, and some layers use the keys and values of others"
    ),
    "internvl_chat": "transformers has its code as 'internvl': the model whose name ends in -hf",
    "kimi_k2": "transformers has its code as 'deepseek_v3': write that as model_type, and remove auto_map",
    **dict.fromkeys(("lfm2", "lfm2_moe"), "its convolutions would read the tokens of the sample before in a pack"),
    "mllama": "its layers attend to images separately from the text",
    "nemotron_h": "its Mamba layers would pass the state of a sample on to the next one in a pack",
    "paligemma": "a prompt's tokens see those that follow them",
    "qwen4_exp": "its attention is sparse, and its embeddings are of several tokens",
}
"""Why well-known `model_type`s are not supported."""
SCORING, CHOICE = "sigmoid", "noaux_tc"
"""Scoring function of routers in models with latent attention, and their top-k method: with a bias, within the best
groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that builds a model with a head from this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in VISION_KINDS else AutoModelForCausalLM


THEIR_CONFIG = "use the config.json that these weights came with"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check_place(path: str, key: str = "model.path") -> None:
    """Raise `ModelError` if there can be no model at `path`, as far as is known without importing anything."""
    folder = Path(path)
    if folder.is_file():
        raise ModelError(f"{key} = '{path}' is a file", "give the folder that holds config.json")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{key} = '{path}': the folder holds no config.json", "give a Hugging Face model folder")
        check_model_folder(folder)
    elif not _HUB_ID.fullmatch(path):
        raise ModelError(f"{key} = '{path}': there is no such folder", "give a model folder or a hub id (owner/name)")


def read_config(path: str, key: str = "model.path") -> PreTrainedConfig:
    """The model's config, once everything in it is known to be supported. key: where the path was given."""
    check_place(path, key)
    from transformers import AutoConfig

    folder = Path(path)
    stored = stored_config(path) or {}
    kind = stored.get("model_type")
    if isinstance(kind, str) and kind in REFUSED:  # transformers would ask whether to run the model's own code
        _refuse_kind(path, kind, has_vision_encoder="vision_config" in stored)
    _check_layer_types(path, stored)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers' validators raise various errors
        if folder.is_dir():
            raise ModelError(
                f"{path}/config.json does not load: {first_line(error).rstrip('.')}",
                f"check that it is complete and of a supported kind ({', '.join((*SUPPORTED, *VISION_KINDS))})",
            ) from error
        raise ModelError(
            f"{key} = '{path}' is neither a local folder nor available from the hub: {first_line(error)}",
            "check the name, the network and the login (`hf auth login`), or download it and give the folder",
        ) from error
    # Read as bfloat16 (`rlcli.model.io.mxfp4`); what is built by this config, or written with it, is not quantised.
    quantized = getattr(config, "quantization_config", None)
    if config.model_type == "gpt_oss" and isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4":
        del config.quantization_config
    _check_config(path, config)
    return config


LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention", "chunked_attention")
"""Values of `layer_types` with one meaning. Others, such as mamba, transformers reads as one of these."""


def _check_layer_types(path: str, values: Mapping[str, Any]) -> None:
    """Raise `ModelError` for layers of a kind unknown here, in a model whose other layers may be known."""
    text = values.get("text_config")
    types = (text if isinstance(text, dict) else values).get("layer_types")
    unknown = [kind for kind in types if kind not in LAYER_TYPES] if isinstance(types, list) else []
    if isinstance(types, list) and unknown:
        raise ModelError(
            f"{path}: {len(unknown)} of its {len(types)} layers are of a kind unknown here, '{unknown[0]}' "
            "(layer_types)",
            "choose another model",
        )


SIZES = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "vocab_size", "max_position_embeddings"),
    *("num_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
"""Sizes in config.json; none may be 0."""
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Sizes of latent attention in config.json."""
MOST = 1 << 31
"""An upper bound on each."""
KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""Types whose sizes are all plain numbers; transformers reads the others."""
SPECIAL = ("rope_scaling", "quantization_config", "text_config")
"""Keys that, if set, need transformers to read them."""


def check_sizes(path: str, config: PreTrainedConfig | SimpleNamespace) -> None:
    """Raise `ModelError` for an impossible size: arithmetic with it would fail far from config.json."""
    for name in (*SIZES, *LATENT_SIZES, *LINEAR_SIZES):
        size = getattr(config, name, None)
        if isinstance(size, int) and size < 1:
            raise ModelError(f"{path}: config.json has {name} = {size}, and a model needs 1 or more", THEIR_CONFIG)
        if isinstance(size, int) and size >= MOST:
            raise ModelError(f"{path}: config.json has {name} = {size:.3g}, which is too large", THEIR_CONFIG)


def _check_config(path: str, config: PreTrainedConfig) -> None:
    def refuse(problem: str, hint: str = "choose another model") -> None:
        raise ModelError(f"{path}: {problem}", hint)

    if config.model_type not in (*SUPPORTED, *VISION_KINDS):
        _refuse_kind(path, config.model_type, has_vision_encoder=hasattr(config, "vision_config"))
    if config.model_type in VISION_KINDS and (why := VISION_KINDS[config.model_type].refused(config)):
        refuse(why)
    config = config.get_text_config()
    check_sizes(path, config)
    _check_attention(config, refuse)
    if is_recurrent(config):
        _check_linear_attention(config, refuse)
    if getattr(config, "final_logit_softcapping", None):
        refuse("its logits are capped (final_logit_softcapping)")
    _check_experts(config, refuse)
    if config.model_type in LATENT:
        _check_latent(config, refuse)
    if config.model_type == "gpt_oss":
        _check_gpt_oss(config, refuse)
    if getattr(config, "quantization_config", None):
        refuse("the weights are quantised and cannot be trained", "choose the unquantised model")


def _refuse_kind(path: str, kind: str, *, has_vision_encoder: bool = False) -> None:
    why = f": {REFUSED[kind]}" if kind in REFUSED else ""
    hint = (
        f"supported vision-language models: {', '.join(VISION_KINDS)}"
        if has_vision_encoder
        else near(kind, (*SUPPORTED, *VISION_KINDS))
    )
    raise ModelError(f"{path}: the architecture '{kind}' is not supported{why}", hint)


def expert_count(config: PreTrainedConfig | SimpleNamespace) -> int:
    """Experts of each layer that has some; 0 in a dense model."""
    return int(getattr(config, "num_experts", 0) or getattr(config, "n_routed_experts", 0) or 0)


def dense_layers(config: PreTrainedConfig | SimpleNamespace) -> int:
    """Number of layers of a mixture of experts before the first one that has experts."""
    if not expert_count(config):
        return 0
    if kinds := getattr(config, "mlp_layer_types", None):
        return next((layer for layer, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    return int(getattr(config, "first_k_dense_replace", 0) or 0)


def is_latent(path: str) -> bool:
    """True if the model at `path`, a folder or a hub id in the cache, is known to have latent attention."""
    return (stored_config(path) or {}).get("model_type") in LATENT


def engine_keys(path: str) -> dict[str, Any]:
    """Keys that vLLM reads in the config.json of the model at `path`, a folder or a hub id in the cache, but that
    transformers does not write, since it supports one value only. Without them vLLM would select experts by softmax, or
    not start."""
    values = stored_config(path) or {}
    return missing_keys(values) if values.get("model_type") in LATENT else {}


def add_engine_keys(folder: Path) -> None:
    """Add the `engine_keys` to the config.json of a folder that transformers has written."""
    file = folder / "config.json"
    values = read_json(file)
    if values.get("model_type") in LATENT:
        file.write_text(json.dumps(values | missing_keys(values), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def missing_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The `engine_keys` that are missing in the contents of a config.json of a model with latent attention."""
    wanted: dict[str, Any] = {"scoring_func": SCORING, "topk_method": CHOICE}
    if values["model_type"] == "glm4_moe_lite":
        dense = dense_layers(SimpleNamespace(**values))
        wanted["first_k_dense_replace"] = dense if values.get("mlp_layer_types") else 1
    return {name: value for name, value in wanted.items() if name not in values}


def _check_experts(config: PreTrainedConfig, refuse: Callable[..., None]) -> None:
    experts = expert_count(config)
    if not experts:
        return
    experts_per_token, groups = config.num_experts_per_tok, getattr(config, "n_group", 1) or 1
    if config.model_type in SEPARATE_HEAD and config.tie_word_embeddings:
        refuse("its head is its embedding (tie_word_embeddings), which vLLM does not load for this architecture")
    if experts % groups:
        refuse(f"its {experts} experts are not divisible into {groups} groups (n_group)", THEIR_CONFIG)
    at_most = experts // groups * (config.topk_group if groups > 1 else 1)
    if experts_per_token > at_most:
        refuse(f"{experts_per_token} of {at_most} experts cannot be chosen", THEIR_CONFIG)
    if groups > 1 and experts // groups < 2:
        refuse(f"a group of its experts is scored by its best two, and has {experts // groups} (n_group)", THEIR_CONFIG)
    if dense_layers(config) >= config.num_hidden_layers:
        refuse(f"none of its layers has experts (first_k_dense_replace = {dense_layers(config)})", THEIR_CONFIG)
    if getattr(config, "decoder_sparse_step", 1) != 1 or getattr(config, "mlp_only_layers", None):
        refuse("only some of its layers have experts (decoder_sparse_step, mlp_only_layers)")


def is_recurrent(config: PreTrainedConfig) -> bool:
    """True if the model has recurrent layers. config: of the model, or of its text model."""
    return config.get_text_config().model_type in RECURRENT


def has_recurrent_layers(path: str) -> bool:
    """True if the model at `path`, a folder or a hub id in the cache, has recurrent layers. Imports neither
    transformers nor torch."""
    values = stored_config(path) or {}
    text = values.get("text_config")
    kind = (text if isinstance(text, dict) else {}).get("model_type", values.get("model_type"))
    return kind in RECURRENT or f"{kind}_text" in RECURRENT


def _check_linear_attention(config: PreTrainedConfig, refuse: Callable[..., None]) -> None:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        refuse(f"its {values} value heads of linear attention are no multiple of the {keys} key heads", THEIR_CONFIG)
    if "full_attention" not in (config.layer_types or ()):
        refuse("none of its layers attends to all tokens, without which vLLM does not run it")
    if config.linear_conv_kernel_dim < 2:
        refuse(f"linear_conv_kernel_dim = {config.linear_conv_kernel_dim}, and it is 2 or more", THEIR_CONFIG)
    for name in ("hidden_act", "output_gate_type"):
        if getattr(config, name, "silu") not in ("silu", "swish"):
            refuse(f"its linear attention is computed with {name} = silu alone, not {getattr(config, name)}")


def _check_latent(config: PreTrainedConfig, refuse: Callable[..., None]) -> None:
    """Refuse settings of latent attention that transformers or vLLM ignore."""
    if config.attention_bias:
        refuse("its latent attention has biases (attention_bias), which vLLM does not load")
    if config.num_key_value_heads != config.num_attention_heads:
        refuse(
            "its latent attention has other numbers of heads for keys and queries (num_key_value_heads)", THEIR_CONFIG
        )
    if not config.rope_interleave:
        refuse("its rotary embedding is not interleaved (rope_interleave), as vLLM computes it")
    if others := _rope_types(config) - {"default", "yarn"}:
        refuse(f"rope_type '{min(others)}' is computed as yarn by vLLM in latent attention")
    for name, value in (("scoring_func", SCORING), ("topk_method", CHOICE)):
        if getattr(config, name, value) != value:
            refuse(f"{name} = {getattr(config, name)!r} in config.json, and transformers computes {value!r} alone")
    kinds = getattr(config, "mlp_layer_types", None) or []
    dense = dense_layers(config)
    if "dense" in kinds[dense:]:
        refuse("layers without experts come after others that have some (mlp_layer_types)")
    if getattr(config, "first_k_dense_replace", dense) != dense:
        refuse(
            f"{dense} of its first layers have no experts by mlp_layer_types, and {config.first_k_dense_replace} by "
            "first_k_dense_replace",
            THEIR_CONFIG,
        )
    if getattr(config, "moe_layer_freq", 1) != 1:
        refuse(f"only some of its layers have experts (moe_layer_freq = {config.moe_layer_freq})")


def _check_gpt_oss(config: PreTrainedConfig, refuse: Callable[..., None]) -> None:
    """Refuse settings of GPT-OSS that vLLM ignores."""
    fixed = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True}
    for name, value in fixed.items():
        if getattr(config, name) != value:
            refuse(f"{name} = {getattr(config, name)}, and vLLM computes with {value} alone for this architecture")
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(config.num_hidden_layers)]
    if config.layer_types != alternating:
        refuse("its windows are not those of every other layer from the first one on (layer_types), as in vLLM")
    if _rope_types(config) != {"yarn"}:
        refuse(f"rope_type '{min(_rope_types(config))}' is computed as yarn by vLLM for this architecture")


def _check_attention(config: PreTrainedConfig, refuse: Callable[..., None]) -> None:
    # If a config lists the type of each layer, its window applies to layers of that type; otherwise to all layers.
    layers, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if is_recurrent(config):
        layers = layers - {"linear_attention"}
    if (layers - {"full_attention"} if layers else window) and not (
        config.model_type in WINDOWED and layers <= {"full_attention", "sliding_attention"}
    ):
        refuse(f"attention is not full in every layer (sliding_window = {window})")
    if window is None and "sliding_attention" in layers:
        refuse("layers attend within a sliding window, and config.json has no sliding_window", THEIR_CONFIG)
    if window is not None and window < 1:
        refuse(f"sliding_window = {window}, and a token sees 1 or more", THEIR_CONFIG)
    if getattr(config, "use_bidirectional_attention", None):
        refuse("its tokens see those that follow them (use_bidirectional_attention)")
    for rope in _rope_types(config):
        if rope in ("dynamic", "longrope"):
            refuse(f"rope_type '{rope}' makes a token's log-prob depend on what else is in the batch")


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """Types of rotary embedding of all layers; some models have one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = (
        parameters.values()
        if parameters and all(isinstance(rope, dict) for rope in parameters.values())
        else [parameters]
    )
    return {rope.get("rope_type", "default") for rope in each}


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # A line that ends in a colon needs the next one.
    return " ".join(line.strip() for line in lines[: 2 if lines[0].rstrip().endswith(":") else 1])


def plain_config(path: str) -> SimpleNamespace | None:
    """The sizes that `AutoConfig` would give for the model at `path`, a folder or a hub id in the cache; None if the
    file is not that plain. Imports neither transformers nor torch, which takes seconds."""
    values = stored_config(path)
    if values is None or values.get("model_type") not in KINDS or any(map(values.get, SPECIAL)):
        return None
    sizes = [values.get(name) for name in SIZES if name != "head_dim" and "expert" not in name and "moe" not in name]
    if not all(type(size) is int and 0 < size < MOST for size in sizes):
        return None
    if not _has_plain_rotation(values) or not _is_full(values.get("layer_types")):
        return None
    heads, head_dim = values["num_attention_heads"], values.get("head_dim")
    if heads % values["num_key_value_heads"] or values["hidden_size"] % heads:
        return None
    if type(values.get("tie_word_embeddings")) is not bool or not _attends_to_all(values):
        return None
    if not (type(head_dim) is int and head_dim > 0) and (head_dim or values["model_type"] == "qwen3"):
        return None  # for a Qwen3 the default is 128
    return SimpleNamespace(**values)


def stored_config(path: str) -> dict[str, Any] | None:
    """The contents of the config.json of a folder or of a hub id in the cache, if it can be read."""
    file = Path(path) / "config.json"
    location = file if file.is_file() else cached_config(path)
    try:
        values = read_json(location, links=True) if location else None
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _has_plain_rotation(values: dict[str, Any]) -> bool:
    """As transformers writes it from version 5 on; one that differs by layer type has no `rope_type`."""
    rotation = values.get("rope_parameters")
    return not rotation or (isinstance(rotation, dict) and rotation.get("rope_type") == "default")


def _is_full(layers: object) -> bool:
    return not layers or (isinstance(layers, list) and all(layer == "full_attention" for layer in layers))


def _attends_to_all(values: dict[str, Any]) -> bool:
    kind = values["model_type"]
    if kind.startswith("qwen"):
        return not values.get("use_sliding_window")
    if kind == "mistral":  # the default has a window
        return values.get("sliding_window", "") is None
    return values.get("sliding_window") is None


def cached_config(path: str) -> Path | None:
    """The config.json of a hub id in the hub's cache; None if it is not there, or `path` is no hub id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
