"""The planner's account of what autograd keeps, against what it keeps: every architecture, in both precisions, with and
without adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rlcli_planner.activations import Pack, Pass, kept_bytes, rotation_bytes
from rlcli_planner.model_shape import shape_of
from transformers import AutoConfig, AutoModelForCausalLM

from rlcli.model.io.model_config import SUPPORTED
from rlcli.model.lora import LoraSpec, add_lora
from rlcli.model.muon import hidden_matrices
from rlcli.model.packed import PackedBatch, pack
from rlcli.model.policy import PolicyModel
from tests.kept_bytes import kept_by_torch

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "use_qk_norm": True},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 64},
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    "glm4_moe_lite": {**LATENT, "q_lora_rank": None},
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
}
SHARED = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 80,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": LINEAR | SHARED,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR | SHARED,
}
"""With layers of two kinds."""
MIXTURES |= {kind: sizes for kind, sizes in HYBRIDS.items() if "num_experts" in sizes}
ADAPTED = {"gpt_oss": "q_proj,o_proj", "deepseek_v3": "experts,q_a_proj,kv_b_proj"}
LENGTH, PROMPT, COUNT = 64, 4, 3
EXACT = 1e-9
NEARLY = 0.03
"""For what the formula leaves out: beside experts' tensors their kernels keep some, and the norms of Gemma and Qwen3.5
one of each."""
QUICK = ("qwen2", "olmo2", "qwen3_moe", "qwen3_5_text")  # the rule, and those that differ most
KINDS = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.exhaustive) for kind in SUPPORTED]


def config_of(kind: str, layers: int, **changes: Any) -> Any:
    fields = MIXTURES.get(kind, HYBRIDS.get(kind, {})) | ({"head_dim": 16} if kind != "qwen3_moe" else {})
    if kind in HYBRIDS:
        fields |= {"layer_types": ["linear_attention"] * (layers - 1) + ["full_attention"]}
    if kind in ("gemma3_text", "olmo3"):  # by default most of their layers have windows
        fields |= {"layer_types": ["full_attention"] * layers, "sliding_window": 64}
    return AutoConfig.for_model(kind, **{**SIZES, **fields}, num_hidden_layers=layers, **changes)


def policy_of(config: Any, dtype: torch.dtype, rank: int = 0, targets: str = "all-linear") -> PolicyModel:
    lm = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if rank:
        add_lora(lm, LoraSpec(rank, 8.0, targets), "base", meta=False)
        for parameter in lm.parameters():
            parameter.data = parameter.data.to(dtype)  # as FSDP2 gathers it
    policy = PolicyModel(lm, dtype=dtype, source="base")
    return policy.train()


def different_prompts() -> PackedBatch:
    rows = [(np.arange(LENGTH) % 200 + 3 + i, PROMPT) for i in range(COUNT)]
    return pack(rows, torch.device("cpu"))


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_that_autograd_keeps_is_accounted_for(kind: str, dtype: torch.dtype, rank: int) -> None:
    config, batch = config_of(kind, layers=2), different_prompts()
    run = Pass(dtype.itemsize, on_cpu=True, lora_rank=rank)
    predicted = kept_bytes(shape_of(config), run, Pack(batch.tokens, batch.tokens, len(batch.targets)))
    precision = NEARLY if kind in ("gemma3_text", *HYBRIDS, *MIXTURES) else EXACT
    policy = policy_of(config, dtype, rank)
    assert predicted == pytest.approx(kept_by_torch(policy, lambda: policy(batch)), rel=precision)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_in_float32_keeps_a_copy_of_its_weight(dtype: torch.dtype) -> None:
    config, batch = config_of("qwen2", layers=2), different_prompts()
    policy = policy_of(config, dtype)
    policy.float_head = True
    run = Pass(dtype.itemsize, on_cpu=True, float_head=True)
    predicted = kept_bytes(shape_of(config), run, Pack(batch.tokens, batch.tokens, len(batch.targets)))
    assert predicted == pytest.approx(kept_by_torch(policy, lambda: policy(batch)), rel=EXACT)


def test_an_adapter_on_attention_alone_keeps_only_its_own_inputs() -> None:
    config, batch = config_of("llama", layers=3), different_prompts()
    run = Pass(4, on_cpu=True, lora_rank=4, lora_targets="q_proj,v_proj")
    predicted = kept_bytes(shape_of(config), run, Pack(batch.tokens, batch.tokens, len(batch.targets)))
    policy = policy_of(config, torch.float32, 4, "q_proj,v_proj")
    assert predicted == pytest.approx(kept_by_torch(policy, lambda: policy(batch)), rel=EXACT)


@pytest.mark.parametrize("rank", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [kind for kind in MIXTURES if kind != "gpt_oss"])
def test_an_adapter_on_experts_keeps_their_inputs(kind: str, dtype: torch.dtype, rank: int) -> None:
    config, batch, targets = config_of(kind, layers=2), different_prompts(), "all-linear,experts"
    run = Pass(dtype.itemsize, on_cpu=True, lora_rank=rank, lora_targets=targets)
    predicted = kept_bytes(shape_of(config), run, Pack(batch.tokens, batch.tokens, len(batch.targets)))
    policy = policy_of(config, dtype, rank, targets)
    assert predicted == pytest.approx(kept_by_torch(policy, lambda: policy(batch)), rel=NEARLY)


def test_a_shared_prompt_is_kept_once_outside_attention() -> None:
    config, prompt = config_of("qwen2", layers=2), np.arange(32) + 3
    rows = [(np.concatenate([prompt, np.arange(32) + 40 + i]), 32) for i in range(COUNT)]
    batch = pack(rows, torch.device("cpu"))
    assert batch.tokens == 32 + COUNT * 32
    predicted = kept_bytes(shape_of(config), Pass(4, on_cpu=True), Pack(batch.tokens, COUNT * 64, len(batch.targets)))
    policy = policy_of(config, torch.float32)
    mask = 4 * (COUNT - 1) * 32 * 64  # of all layers together, and so not counted
    assert predicted + mask == pytest.approx(kept_by_torch(policy, lambda: policy(batch)), rel=EXACT)


def test_checkpointing_keeps_the_input_of_each_layer() -> None:
    config, batch = config_of("qwen2", layers=4), different_prompts()
    policy = policy_of(config, torch.float32)
    policy.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    run = Pass(4, on_cpu=True, checkpointing=True)
    predicted = kept_bytes(shape_of(config), run, Pack(batch.tokens, batch.tokens, len(batch.targets)))
    # The rotations are held too, by the layers' closures: autograd does not count them as saved.
    rotations = batch.tokens * rotation_bytes(shape_of(config), run)
    assert predicted - rotations == pytest.approx(kept_by_torch(policy, lambda: policy(batch)), rel=EXACT)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", SUPPORTED)
def test_parameters_are_counted_from_the_config_alone(kind: str, tied: bool) -> None:
    from accelerate import init_empty_weights

    config = config_of(kind, 3, tie_word_embeddings=tied)
    with init_empty_weights():
        lm = AutoModelForCausalLM.from_config(config)
    lm.tie_weights()
    shape = shape_of(config)
    assert shape.parameters == sum(parameter.numel() for parameter in lm.parameters())
    assert shape.layer_parameters == sum(parameter.numel() for parameter in lm.base_model.layers[-1].parameters())
    assert shape.hidden_matrices == sum(matrix.parameter.numel() for matrix in hidden_matrices(lm))


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen2", "all-linear"),
        ("phi3", "all-linear"),
        *((kind, ADAPTED.get(kind, "experts,o_proj")) for kind in MIXTURES),
    ],
)
def test_an_adapter_s_parameters_are_counted_from_the_config_alone(kind: str, targets: str) -> None:
    config = config_of(kind, layers=2)
    trained = sum(p.numel() for p in policy_of(config, torch.float32, 8, targets).parameters() if p.requires_grad)
    assert shape_of(config).adapter_parameters(8, targets) == trained
