"""Mixtures of experts: the names of their tensors, how many tokens each expert has, and what is refused."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper

from rlcli.errors import ConfigError, ModelError
from rlcli.model.io.model_checks import check_model
from rlcli.model.io.model_config import read_config
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.model.lora import LoraSpec, add_lora
from rlcli.model.mixture.routing import Load, Replay, load_metrics
from rlcli.model.packed import pack
from rlcli.model.policy import PolicyModel
from rlcli.model.tensor_names import stored, stored_shapes
from rlcli.model.value_model import read_value_config
from tests.model_fixtures import EXPERTS, MIXTURES, ragged_rows, save_tiny, tiny_lm

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("kind", MIXTURES)


def test_a_file_has_each_expert_and_together_they_are_the_parameter() -> None:
    up = torch.arange(2 * 8 * 3).view(2, 8, 3)
    tensors = dict(stored("layer.experts.gate_up_proj", up))
    assert torch.equal(tensors["layer.experts.1.gate_proj.weight"], up[1, :4])
    assert torch.equal(tensors["layer.experts.0.up_proj.weight"], up[0, 4:])
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == stored_shapes(
        "layer.experts.gate_up_proj", up.shape
    )
    down = dict(stored("layer.experts.down_proj", up))
    assert torch.equal(down["layer.experts.1.down_proj.weight"], up[1])
    assert dict(stored("lm_head.weight", up)) == {"lm_head.weight": up}


ATTENTION = {
    "deepseek_v3": ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"],
    "glm4_moe_lite": ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_proj"],
    "qwen3_next": ["in_proj_ba", "in_proj_qkvz", "k_proj", "o_proj", "out_proj", "q_proj", "v_proj"],
    "qwen3_5_moe_text": [
        *("in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "k_proj", "o_proj", "out_proj", "q_proj", "v_proj"),
    ],
}
"""Linear layers of latent attention, and of a mixer of linear attention beside the usual ones."""


def blocks_of(lm: Any) -> list[Any]:
    """The parts of layers that have experts."""
    return [layer.mlp for layer in lm.model.layers if hasattr(layer.mlp, "experts")]


def router_of(block: Any) -> Any:
    return block.router if hasattr(block, "router") else block.gate


@KINDS
def test_the_load_is_what_the_routers_chose(kind: str) -> None:
    lm, rows = tiny_lm(kind), ragged_rows(5)
    load, choices = Load(lm), list[Any]()
    policy = PolicyModel(lm, dtype=torch.float32, source="tiny")
    for block in blocks_of(lm):
        router_of(block).register_forward_hook(lambda module, args, output: choices.append(output[2].tolist()))
    with torch.no_grad():
        policy(pack(rows, CPU))
    assert load.take() is None, "what has no gradient trains no expert"
    choices.clear()
    batches = [pack(rows[:2], CPU), pack(rows[2:], CPU)]
    for batch in batches:
        policy(batch)
    counts = load.take()
    assert counts is not None
    for layer in (0, 1):
        flat = [chosen_expert for output in choices[layer::2] for token in output for chosen_expert in token]
        assert counts[layer].tolist() == [flat.count(expert) for expert in range(EXPERTS)]
    assert load.take() is None
    assert Load(tiny_lm()).take() is None


def own_routes(policy: PolicyModel, batch: Any) -> torch.Tensor:
    """The routers' choices without replay, [T, layers, K]."""
    routes: list[torch.Tensor] = []
    hooks = [
        router_of(block).register_forward_hook(lambda module, args, output: routes.append(output[2]))
        for block in blocks_of(policy.lm)
    ]
    with torch.no_grad():
        policy(batch)
    for hook in hooks:
        hook.remove()
    return torch.stack(routes, 1)


def gradients(policy: PolicyModel, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    policy.zero_grad()
    log_probs = policy(batch).log_probs
    log_probs.sum().backward()
    return log_probs.detach(), {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@KINDS
def test_the_routers_own_routes_change_nothing(kind: str) -> None:
    policy, batch = PolicyModel(tiny_lm(kind), dtype=torch.float32, source="tiny"), pack(ragged_rows(5), CPU)
    router_routes, expected = own_routes(policy, batch), gradients(policy, batch)
    policy.replay = Replay(policy)
    log_probs, grads = gradients(policy, replace(batch, routes=router_routes))
    assert torch.equal(log_probs, expected[0])
    assert grads.keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(grads[name], gradient, rtol=1e-5, atol=1e-7)
    assert all(
        gradient.abs().max() > 0
        for name, gradient in grads.items()
        if name.endswith(("mlp.gate.weight", "mlp.router.weight"))
    )
    total = router_routes.numel()
    assert policy.replay.take().tolist() == [total, total, 0]  # type: ignore[union-attr]
    assert policy.replay.take() is None


def clamped(experts: Any, expert: int, state: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's (arXiv 2508.10925): gate and up alternate, are clamped at 7, and have biases, as the output has."""
    gate_up = state @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
    gate, up = gate_up[0::2].clamp(max=7), gate_up[1::2].clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1) @ experts.down_proj[expert] + experts.down_proj_bias[expert]


def of_best_groups(router: Any, scores: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3's: of the groups whose best two score highest (arXiv 2412.19437, section 2.1.2)."""
    groups = scores.view(router.num_group, -1)
    best = groups.topk(2).values.sum(-1).topk(router.topk_group).indices
    seen = torch.zeros(len(groups), dtype=torch.bool).index_fill(0, best, True)
    return groups.where(seen[:, None], -torch.inf).flatten()


@KINDS
@pytest.mark.parametrize("checkpointed", [False, True])
def test_other_routes_are_taken_with_live_weights(kind: str, checkpointed: bool) -> None:
    """Against a plain loop over the tokens and their experts, in which the weights are those of the live router."""
    lm, rows = tiny_lm(kind), ragged_rows(5)
    policy, batch = PolicyModel(lm, dtype=torch.float32, source="tiny"), pack(rows, CPU)
    router_routes = own_routes(policy, batch)
    routes = (router_routes + 1) % EXPERTS
    routes[::3] = -1  # the router chooses

    def plain(module: Any, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        states, outputs = hidden.reshape(-1, hidden.shape[-1]), []
        router, experts = router_of(module), module.experts
        biased = hasattr(router, "e_score_correction_bias")
        for token, state in enumerate(states):
            logits = torch.nn.functional.linear(state, router.weight, getattr(router, "bias", None))
            scores = logits.sigmoid() if biased else logits.softmax(-1)
            expert_ids = routes[token, layer]
            if (expert_ids < 0).any():
                bias = router.e_score_correction_bias if biased else 0
                choice = of_best_groups(router, scores + bias) if biased else scores
                expert_ids = choice.topk(routes.shape[-1]).indices
            weights = scores[expert_ids] / scores[expert_ids].sum() * (1.5 if biased else 1)
            output = torch.zeros_like(state)
            if biased:
                output = module.shared_experts(state)
            elif hasattr(module, "shared_expert"):
                output = module.shared_expert_gate(state).sigmoid() * module.shared_expert(state)
            for weight, expert in zip(weights, expert_ids.tolist(), strict=True):
                if kind == "gpt_oss":
                    output = output + weight * clamped(experts, expert, state)
                    continue
                gate, up = (experts.gate_up_proj[expert] @ state).chunk(2)
                output = output + weight * (experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
            outputs.append(output)
        grads = torch.stack(outputs).view_as(hidden)
        return (grads, None) if kind == "gpt_oss" else grads

    blocks = blocks_of(lm)
    forwards = [block.forward for block in blocks]
    for layer, block in enumerate(blocks):
        block.forward = partial(plain, block, layer)
    expected = gradients(policy, batch)
    for block, forward in zip(blocks, forwards, strict=True):
        block.forward = forward
    policy.replay = Replay(policy)
    if checkpointed:  # the second forward pass has to choose as the first one
        lm.gradient_checkpointing_enable({"use_reentrant": False})
        lm.train()
    log_probs, grads = gradients(policy, replace(batch, routes=routes))
    torch.testing.assert_close(log_probs, expected[0], rtol=1e-4, atol=1e-5)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(grads[name], gradient, rtol=1e-3, atol=1e-5)
    counts = policy.replay.take()
    assert counts is not None
    total, replayed, others = counts.tolist()
    known = (routes >= 0).all(-1)
    assert replayed / total == pytest.approx(known.float().mean().item())
    assert others > 0


def test_a_collapsed_router_is_seen() -> None:
    even, collapsed = torch.full((2, 8), 5), torch.tensor([[0] * 7 + [40], [5] * 8])
    assert load_metrics(even) == {"busiest_expert": 1.0, "unused_experts": 0.0}
    assert load_metrics(collapsed) == {"busiest_expert": 8.0, "unused_experts": 7 / 16}
    assert load_metrics(torch.zeros(2, 4, dtype=torch.int64)) == {"busiest_expert": 0.0, "unused_experts": 1.0}


@KINDS
def test_adapters_are_on_attention_alone_unless_asked_for(kind: str) -> None:
    lm = tiny_lm(kind)
    add_lora(lm, LoraSpec(4, 8.0), "tiny", meta=False)
    adapted = {name.rpartition(".lora_")[0].rpartition(".")[2] for name, p in lm.named_parameters() if p.requires_grad}
    linear = ATTENTION.get(kind, ["k_proj", "o_proj", "q_proj", "v_proj"])
    assert adapted == set(linear)
    with pytest.raises(ModelError, match="no linear layer 'down_proj'") as refused:
        add_lora(tiny_lm(kind), LoraSpec(4, 8.0, "down_proj"), "tiny", meta=False)
    available = [*linear, *(["experts"] if kind != "gpt_oss" else [])]
    assert refused.value.hint == f"there is: {', '.join(available)}, or all-linear for all in attention"
    other = kind if kind == "gpt_oss" else "qwen2"
    with pytest.raises(ModelError, match="no linear layer 'experts'"):
        add_lora(tiny_lm(other), LoraSpec(4, 8.0, "experts"), "tiny", meta=False)


def with_adapters(kind: str, rank: int) -> tuple[Any, PolicyModel]:
    """A model without, and with adapters on its experts alone that are not zero."""
    plain = tiny_lm(kind)
    lm = copy.deepcopy(plain)
    peft = add_lora(lm, LoraSpec(rank, 6.0, "experts"), "tiny", meta=False)
    policy = PolicyModel(lm, dtype=torch.float32, source="tiny", peft=peft)
    assert torch.allclose(policy(pack(ragged_rows(5), CPU)).log_probs, log_probs_of(plain), rtol=0, atol=2e-6), "B = 0"
    for name, parameter in lm.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return plain, policy


def log_probs_of(lm: Any) -> torch.Tensor:
    return PolicyModel(lm, dtype=torch.float32, source="tiny")(pack(ragged_rows(5), CPU)).log_probs.detach()


@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("kind", [kind for kind in MIXTURES if kind != "gpt_oss"])
def test_an_adapter_on_experts_is_what_peft_adds_to_their_weights(kind: str, rank: int) -> None:
    plain, policy = with_adapters(kind, rank)
    batch = pack(ragged_rows(5), CPU)
    log_probs, grads = gradients(policy, batch)
    assert (log_probs - log_probs_of(plain)).abs().max() > 1e-3
    assert all(name.rpartition(".lora_")[1] for name in grads), "the base has no gradient"
    merged = copy.deepcopy(plain)
    assert not merged.load_state_dict(dict(policy.stream_weights()), strict=False).unexpected_keys
    assert torch.allclose(log_probs, log_probs_of(merged), rtol=0, atol=1e-5)
    base = dict(policy.stream_base())
    assert all(torch.equal(base[name], parameter) for name, parameter in plain.named_parameters() if name in base)
    for module in policy.modules():  # peft's own way: the product is added to the weights
        if isinstance(module, ParamWrapper):
            del module.forward
            vars(module.get_base_layer()).pop("forward", None)
    theirs, expected = gradients(policy, batch)
    assert torch.allclose(log_probs, theirs, rtol=0, atol=1e-5)
    assert grads.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(grads[name], gradient, rtol=1e-3, atol=1e-5)
        assert gradient.abs().max() > 0


def test_without_its_adapters_a_mixture_is_its_base() -> None:
    plain, policy = with_adapters("qwen3_moe", 4)
    with policy.adapter_disabled():
        assert torch.allclose(policy(pack(ragged_rows(5), CPU)).log_probs, log_probs_of(plain), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 7}, "7 of 6 experts cannot be chosen"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "only some of its layers have experts"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "only some of its layers have experts"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size = 0"),
        ("mixtral", {"num_experts_per_tok": 7}, "7 of 6 experts cannot be chosen"),
        ("mixtral", {"sliding_window": 16}, "attention is not full in every layer"),
        ("glm4_moe", {"tie_word_embeddings": True}, "its head is its embedding"),
        ("glm4_moe", {"n_group": 4}, "6 experts are not divisible into 4 groups"),
        ("glm4_moe", {"n_group": 6}, "2 of 1 experts cannot be chosen"),
        ("glm4_moe", {"first_k_dense_replace": 3}, "none of its layers has experts"),
        ("gpt_oss", {"swiglu_limit": 10.0}, "swiglu_limit = 10.0, and vLLM computes with 7.0 alone"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias = False, and vLLM computes with True alone"),
        (
            "gpt_oss",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "every other layer from the first one on",
        ),
        ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "is computed as yarn by vLLM"),
        ("gpt_oss", {"tie_word_embeddings": True}, "its head is its embedding"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "the weights are quantised"),
        ("deepseek_v3", {"attention_bias": True}, "its latent attention has biases"),
        ("deepseek_v3", {"rope_interleave": False}, "its rotary embedding is not interleaved"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' in config.json"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy' in config.json"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "other numbers of heads"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "only some of its layers have experts"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank = 0"),
        ("deepseek_v3", {"tie_word_embeddings": True}, "its head is its embedding"),
        ("deepseek_v3", {"n_group": 6, "topk_group": 2}, "scored by its best two, and has 1"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "dense"]}, "come after others that have some"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "1 of its first layers have no experts by mlp_layer_types"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, kind: str, changes: dict[str, Any], says: str) -> None:
    folder = save_tiny(tmp_path / "mixture", kind)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError) as refused:
        read_config(str(folder))
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3_moe", "model.layers.0.mlp.experts.3.up_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w3.weight"),
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("glm4_moe_lite", "model.layers.2.mlp.experts.3.up_proj.weight"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias"),
    ],
)
def test_a_mixture_without_one_of_its_tensors_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_tiny(tmp_path / "mixture", kind)
    check_model(str(folder))
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"{re.escape(name)}, which config.json requires"):
        check_model(str(folder))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("kimi_k2", "transformers has its code as 'deepseek_v3'"),
        ("qwen4_exp", "its attention is sparse"),
    ],
)
def test_a_family_that_is_not_supported_is_refused_with_the_reason(tmp_path: Path, kind: str, says: str) -> None:
    folder = tmp_path / kind
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ModelError) as refused:
        read_config(str(folder))
    assert f"the architecture '{kind}' is not supported" in refused.value.message
    assert says in refused.value.message


def test_a_value_model_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no value model of the architecture 'glm4_moe'"):
        read_value_config(str(save_tiny(tmp_path / "glm", "glm4_moe")))
    read_value_config(str(save_tiny(tmp_path / "mixtral", "mixtral")))


def test_a_tiny_mixture_is_made(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", experts=4)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["num_experts_per_tok"]) == ("qwen3_moe", 2)
    check_model(str(folder))
    with pytest.raises(ConfigError, match="--experts = 1 is less than 2; give 2 or more, or 0"):
        make_tiny_model(tmp_path / "other", experts=1)
