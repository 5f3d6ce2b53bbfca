"""Reads a model's sizes directly from its config.json if it is complete: transformers and torch take seconds to import,
which a caller that only needs sizes should not wait for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlcli.model.io.config import MOST, SIZES

KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""Types whose sizes are all plain numbers; transformers reads the others."""
SPECIAL = ("rope_scaling", "quantization_config", "text_config")
"""Keys that, if set, need transformers to read them."""


def plain_config(path: str) -> SimpleNamespace | None:
    """The sizes that `AutoConfig` would give for the model at `path`, a folder or a hub id in the cache; None if the
    file is not that plain."""
    file = _config_file(path)
    try:
        values = json.loads(file.read_text(encoding="utf-8")) if file else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or values.get("model_type") not in KINDS or any(map(values.get, SPECIAL)):
        return None
    whole = [values.get(name) for name in SIZES if name != "head_dim"]
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
        return None  # for a Qwen3 the default is 128
    return SimpleNamespace(**values)


def _has_plain_rotation(values: dict[str, Any]) -> bool:
    """As transformers writes it from version 5 on; one that differs by layer type has no `rope_type`."""
    rotation = values.get("rope_parameters")
    return not rotation or (isinstance(rotation, dict) and rotation.get("rope_type") == "default")


def _is_full(layers: Any) -> bool:
    return not layers or (isinstance(layers, list) and all(layer == "full_attention" for layer in layers))


def _attends_to_all(values: dict[str, Any]) -> bool:
    kind = values["model_type"]
    if kind.startswith("qwen"):
        return not values.get("use_sliding_window")
    if kind == "mistral":  # the default has a window
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
