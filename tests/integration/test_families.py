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


@pytest.mark.parametrize("kind", OWN)
def test_the_engine_samples_from_what_is_trained(kind: str, sums: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlcli.model.io.tiny import save_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = tmp_path / "model"
    model.mkdir()
    save_model(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **ids, **OWN[kind])), model)
    steps = train(model, sums, tmp_path / "runs", 2, ["grpo"])["grpo"]["steps"]
    assert len(steps) == 2
    for step in steps:
        assert step["sync/unchecked_tensors"] == 0
        assert step["canary/max_abs_diff"] < 1e-4
        assert step["mismatch/k3"] < 1e-9
        assert step["update/grad_norm"] > 0
