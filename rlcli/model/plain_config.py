"""A model's sizes straight from its config.json, where all that matters stands in it: transformers and torch take
seconds to import, and whoever only asks for sizes should not wait for them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""Those whose sizes are all plain numbers of their own; of others transformers is asked."""
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)
MOST = 1 << 31
"""No model has so many of anything that config.json counts."""
SPECIAL = ("rope_scaling", "quantization_config", "text_config")
"""Keys that, where they say anything, want to be read by those who know them."""


def plain_config(path: str) -> SimpleNamespace | None:
    """What `AutoConfig` would say of the sizes of the model at `path`, a folder or a hub id that the cache has; None
    where the file is not that plain."""
    file = _config_file(path)
    try:
        values = json.loads(file.read_text(encoding="utf-8")) if file else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or values.get("model_type") not in KINDS or any(map(values.get, SPECIAL)):
        return None
    whole = [values.get(name) for name in SIZES]
    if not all(type(size) is int and 0 < size < MOST for size in whole):
        return None
    if not _has_plain_rotation(values) or not _is_full(values.get("layer_types")):
        return None
    heads, head_dim = values["num_attention_heads"], values.get("head_dim")
    if heads % values["num_key_value_heads"] or values["hidden_size"] % heads:
        return None
    if type(values.get("tie_word_embeddings")) is not bool or not _attends_to_all(values):
        return None
    if not (type(head_dim) is int and head_dim > 0) and (head_dim or values["model_type"] == "qwen3"):
        return None  # of a Qwen3 it is 128 where it is not told
    return SimpleNamespace(**values)


def _has_plain_rotation(values: dict[str, Any]) -> bool:
    """As transformers writes it from version 5 on; one with kinds of its own for some layers has no `rope_type`."""
    rotation = values.get("rope_parameters")
    return not rotation or (isinstance(rotation, dict) and rotation.get("rope_type") == "default")


def _is_full(layers: Any) -> bool:
    return not layers or (isinstance(layers, list) and all(layer == "full_attention" for layer in layers))


def _attends_to_all(values: dict[str, Any]) -> bool:
    kind = values["model_type"]
    if kind.startswith("qwen"):
        return not values.get("use_sliding_window")
    if kind == "mistral":  # one that says nothing has a window
        return values.get("sliding_window", "") is None
    return values.get("sliding_window") is None


def _config_file(path: str) -> Path | None:
    file = Path(path) / "config.json"
    if file.is_file():
        return file
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
