"""Models of other families than the quickstart's, through real runs: what two FSDP2 ranks train is what vLLM samples
from, within a sliding window, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_catalog import train

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
OWN: dict[str, dict[str, Any]] = {"gemma3_text": {**WINDOW, "query_pre_attn_scalar": 32}, "glm4": {}}
OWN |= {"olmo2": {}, "olmo3": WINDOW, "smollm3": {}}  # which vLLM takes from transformers
OWN["mixtral"] = {"num_local_experts": 4, "num_experts_per_tok": 2}
OWN["glm4_moe"] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
OWN |= {
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | SHARED,
    "qwen3_next": LINEAR | SHARED | {"tie_word_embeddings": False},
}
LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,  # with the rotated part the one width of vLLM's kernel for CPUs
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False,
    "head_dim": 64,
}
OWN["deepseek_v3"] = {**LATENT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5}
OWN["glm4_moe_lite"] = {**LATENT, "mlp_layer_types": ["dense", "sparse"], "q_lora_rank": None}
OWN["gpt_oss"] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
    "sliding_window": 16,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
MIXTURES = ("mixtral", "glm4_moe", "deepseek_v3", "glm4_moe_lite", "gpt_oss")


ADAPTED: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {}}
"""Of which vLLM would adapt head and embedding too."""


def made(kind: str, settings: dict[str, Any], folder: Path) -> Path:
    """A tiny model of a family, with weights drawn at random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlcli.model.io.tiny_model import save_model, tiny_tokenizer
    from rlcli.model.tensor_names import fixed_weights

    tokenizer = tiny_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    folder.mkdir()
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | ids | settings))
    for _, bias in fixed_weights(lm):  # of the size of differences between scores: it changes many choices
        torch.nn.init.normal_(bias, std=0.1)
    save_model(lm, folder)
    return folder


@pytest.mark.parametrize("kind", OWN)
def test_the_engine_samples_from_what_is_trained(
    kind: str, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(kind, OWN[kind], tmp_path / "model")
    if kind in MIXTURES:  # in float32 trainer and engine choose alike: one route at another layer's place would show
        monkeypatch.setenv("CATALOG_SETS", "rollout.replay_routes=true train.minibatches=1 parallel.expert=2")
    steps = train(model, sums, tmp_path / "runs", 2, ["grpo"])["grpo"]["steps"]
    assert len(steps) == 2
    for step in steps:
        assert step["sync/unchecked_tensors"] == 0
        assert step["log_prob_check/max_abs_diff"] < 1e-4
        assert step["mismatch/k3"] < 1e-9
        assert step["update/grad_norm"] > 0
        if kind in MIXTURES:
            assert step["update/routes_differ"] == 0
            assert step["update/routes_known"] > 0.9


@pytest.mark.parametrize("kind", ADAPTED)
def test_an_adapter_in_bfloat16_passes_the_log_prob_check(
    kind: str, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(kind, ADAPTED[kind], tmp_path / "model")
    monkeypatch.setenv("CATALOG_SETS", "model.dtype=bfloat16 lora.rank=4")
    steps = train(model, sums, tmp_path / "runs", 1, ["grpo"])["grpo"]["steps"]
    assert len(steps) == 2
    for step in steps:
        assert step["log_prob_check/tokens"] > 0
        assert 0 < step["log_prob_check/margin"] <= 1
        assert step["update/grad_norm"] > 0
