"""Tiny models of every supported architecture, with random weights, for the tests of rlcli.model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcli.model.io.model_config import SEPARATE_HEAD
from rlcli.model.tensor_names import fixed_weights

VOCABULARY = 100
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = 6
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}
LATENT_SIZES = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "head_dim": 16,  # another name of it
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
}
"""Options of latent attention, whose keys are wider than its values."""
MIXTURES: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
    },
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **LATENT_SIZES,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "rope_parameters": YARN,
    },
    "glm4_moe_lite": {
        **LATENT_SIZES,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "q_lora_rank": None,
        "routed_scaling_factor": 1.5,
        "rms_norm_eps": 1e-6,
    },
    "gpt_oss": {
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "qwen3_moe": {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}
"""Two layers of each have experts."""
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
SHARED = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": LINEAR | SHARED,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR | SHARED,
}
"""With linear attention in their first layer."""
MIXTURES |= {kind: sizes for kind, sizes in HYBRIDS.items() if "num_experts" in sizes}
Row = tuple[np.ndarray, int]


def tiny_config(kind: str = "qwen2", **changes: Any) -> Any:
    from transformers import AutoConfig

    kind_options = MIXTURES.get(kind, HYBRIDS.get(kind, {}))
    if kind in HYBRIDS and "num_hidden_layers" in changes:
        kind_options = kind_options | {
            "layer_types": ["linear_attention"] * (changes["num_hidden_layers"] - 1) + ["full_attention"]
        }
    if kind in ("gemma3_text", "olmo3"):  # by default most of their layers have windows
        layers = ["full_attention"] * changes.get("num_hidden_layers", SIZES["num_hidden_layers"])
        windowed = changes.get("sliding_window") is not None
        kind_options = {"layer_types": ["sliding_attention", *layers[1:]] if windowed else layers}
        changes = changes if windowed else {**changes, "sliding_window": 64}
    if kind == "gpt_oss" and changes.get("sliding_window") is None:
        changes = {**changes, "sliding_window": 64}
    return AutoConfig.for_model(
        kind, **{**SIZES, **kind_options, "tie_word_embeddings": kind not in SEPARATE_HEAD, **changes}
    )  # as published


def tiny_lm(kind: str = "qwen2", seed: int = 0, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(tiny_config(kind, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in lm.parameters():  # the usual small initialisation would hide differences
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, parameter in lm.named_parameters():
            if name.endswith("linear_attn.A_log"):  # with the usual ones most heads forget all within two tokens
                parameter.uniform_(-4, -2)
            elif name.endswith("linear_attn.conv1d.weight"):
                parameter.normal_(0, 0.5)
        for _, bias in fixed_weights(lm):  # of the size of differences between scores: it changes many choices
            bias.copy_(torch.randn_like(bias) * 0.1)
    return lm


def save_tokenizer(folder: Path, ids: int = VOCABULARY, template: str | None = "{{ messages[0]['content'] }}") -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{chr(0x4E00 + i): i for i in range(2, ids)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    fast.chat_template = template
    fast.save_pretrained(folder)


def save_tiny(folder: Path, kind: str = "qwen2", **changes: Any) -> Path:
    tiny_lm(kind, **changes).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def ragged_rows(count: int = 7, longest: int = 40, seed: int = 0) -> list[Row]:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, longest, count)
    return [(random.integers(0, VOCABULARY, n), int(random.integers(1, n + 1))) for n in lengths]


def padded_log_probs(lm: Any, rows: list[Row], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all response tokens by the model's own padded forward: the independent reference."""
    longest = max(len(tokens) for tokens, _ in rows)
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
    for row, (tokens, _) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    logits = lm(input_ids=ids, attention_mask=mask, use_cache=False).logits.float() / temperature
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    picked = log_p[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    spans = [(row, prompt - 1, len(tokens) - 1) for row, (tokens, prompt) in enumerate(rows)]
    return (
        torch.cat([picked[row, start:end] for row, start, end in spans]),
        torch.cat([entropy[row, start:end] for row, start, end in spans]),
    )
