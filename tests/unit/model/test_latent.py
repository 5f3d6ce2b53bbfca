"""Models with latent attention: what transformers leaves otherwise than vLLM has it, and what vLLM needs besides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlcli.model.io.loading import _without_weights, read_model
from rlcli.model.io.model_config import LATENT, add_engine_keys, engine_keys, read_config
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.model.tensor_names import for_vllm, named_weights
from rlcli.rollout.vllm.vllm_arguments import engine_arguments, server_arguments
from tests.model_fixtures import EXPERTS, save_tiny, tiny_config, tiny_lm

KINDS = pytest.mark.parametrize("kind", LATENT)


@KINDS
@pytest.mark.parametrize("read", [False, True])
def test_norms_of_compressed_tensors_have_the_configs_epsilon(kind: str, read: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config(kind, rms_norm_eps=1e-4)
    if read:
        tiny_lm(kind, rms_norm_eps=1e-4).save_pretrained(tmp_path)
        lm = read_model(AutoModelForCausalLM, str(tmp_path), config)
    else:
        lm = _without_weights(AutoModelForCausalLM, config, torch.float32)
    norms = {name.rpartition(".")[2]: module for name, module in lm.named_modules() if "norm" in name}
    assert {module.variance_epsilon for module in norms.values()} == {1e-4}
    assert ("q_a_layernorm" in norms) == (config.q_lora_rank is not None)
    assert "kv_a_layernorm" in norms


@KINDS
def test_the_bias_for_the_choice_of_experts_stays_in_float32(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    lm = tiny_lm(kind)
    lm.save_pretrained(tmp_path)
    config = tiny_config(kind)
    empty_model = _without_weights(AutoModelForCausalLM, config, torch.bfloat16)
    read = read_model(AutoModelForCausalLM, str(tmp_path), config, dtype=torch.bfloat16)
    for each in (empty_model, read):
        assert {each.model.layers[n].mlp.gate.e_score_correction_bias.dtype for n in (1, 2)} == {torch.float32}
        assert each.lm_head.weight.dtype == torch.bfloat16
    bias = lm.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.any()
    assert torch.equal(read.model.layers[1].mlp.gate.e_score_correction_bias, bias)


@KINDS
def test_the_engine_is_told_what_transformers_does_not_write(kind: str, tmp_path: Path) -> None:
    from dataclasses import replace

    from tests.unit.rollout.test_vllm_settings import spec

    folder = save_tiny(tmp_path / "model", kind)
    wanted = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 1}
    overrides = engine_keys(str(folder))
    written = json.loads((folder / "config.json").read_text())
    assert {name: (written | overrides)[name] for name in wanted} == wanted
    assert not overrides.keys() & written.keys()
    engine_spec = replace(spec("cpu"), model=str(folder))
    assert engine_arguments(engine_spec)["hf_overrides"] == overrides
    assert engine_arguments(replace(engine_spec, float_head=True))["hf_overrides"] == {
        **overrides,
        "head_dtype": "float32",
    }
    assert engine_arguments(engine_spec)["attention_backend"] == "CPU_MLA"
    assert "attention_backend" not in engine_arguments(replace(engine_spec, device="cuda"))
    words = server_arguments(engine_spec)
    assert json.loads(words[words.index("--hf-overrides") + 1]) == overrides
    add_engine_keys(folder)
    assert engine_keys(str(folder)) == {}
    read_config(str(folder))
    assert engine_keys(str(save_tiny(tmp_path / "other"))) == {}


@KINDS
def test_each_expert_goes_to_vllm_by_a_name_of_its_own(kind: str) -> None:
    sent = dict(for_vllm(named_weights(tiny_lm(kind)), kind))
    names = [f"model.layers.1.mlp.experts.{expert}.gate_proj.weight" for expert in range(EXPERTS)]
    assert set(names) < sent.keys()
    assert not any(name.endswith("gate_up_proj") for name in sent)
    assert sent["model.layers.2.mlp.gate.e_score_correction_bias"].dtype == torch.float32


@KINDS
def test_a_tiny_model_of_the_family_is_made(kind: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", kind=kind, hidden=64, heads=2, kv_heads=1)
    config = read_config(str(folder))
    assert config.kv_lora_rank + config.qk_rope_head_dim == 576
    assert engine_keys(str(folder)) == {}
