"""Mixtures of experts: the names of their tensors, how many tokens each expert has, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcli.errors import ConfigError, ModelError
from rlcli.model.experts import Load, load_metrics, stored, stored_shapes
from rlcli.model.io.config import read_config
from rlcli.model.io.facts import check_model
from rlcli.model.io.tiny import make_tiny_model
from rlcli.model.lora import LoraSpec, add_lora
from rlcli.model.packed import pack
from rlcli.model.policy import PolicyModel
from tests.model_fixtures import EXPERTS, ragged_rows, save_tiny, tiny_lm

CPU = torch.device("cpu")


def test_a_file_has_each_expert_and_together_they_are_the_parameter() -> None:
    up = torch.arange(2 * 8 * 3).view(2, 8, 3)
    found = dict(stored("layer.experts.gate_up_proj", up))
    assert torch.equal(found["layer.experts.1.gate_proj.weight"], up[1, :4])
    assert torch.equal(found["layer.experts.0.up_proj.weight"], up[0, 4:])
    assert {name: list(one.shape) for name, one in found.items()} == stored_shapes(
        "layer.experts.gate_up_proj", up.shape
    )
    down = dict(stored("layer.experts.down_proj", up))
    assert torch.equal(down["layer.experts.1.down_proj.weight"], up[1])
    assert dict(stored("lm_head.weight", up)) == {"lm_head.weight": up}


def test_the_load_is_what_the_routers_chose() -> None:
    lm, rows = tiny_lm("qwen3_moe"), ragged_rows(5)
    load, chosen = Load(lm), list[Any]()
    policy = PolicyModel(lm, dtype=torch.float32, source="tiny")
    for layer in lm.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, given, found: chosen.append(found[2].tolist()))
    with torch.no_grad():
        policy(pack(rows, CPU))
    assert load.take() is None, "what has no gradient trains no expert"
    chosen.clear()
    batches = [pack(rows[:2], CPU), pack(rows[2:], CPU)]
    for batch in batches:
        policy(batch)
    counts = load.take()
    assert counts is not None
    for layer in (0, 1):
        flat = [one for found in chosen[layer::2] for token in found for one in token]
        assert counts[layer].tolist() == [flat.count(expert) for expert in range(EXPERTS["num_experts"])]
    assert load.take() is None
    assert Load(tiny_lm()).take() is None


def test_a_collapsed_router_is_seen() -> None:
    even, collapsed = torch.full((2, 8), 5), torch.tensor([[0] * 7 + [40], [5] * 8])
    assert load_metrics(even) == {"busiest_expert": 1.0, "unused_experts": 0.0}
    assert load_metrics(collapsed) == {"busiest_expert": 8.0, "unused_experts": 7 / 16}
    assert load_metrics(torch.zeros(2, 4, dtype=torch.int64)) == {"busiest_expert": 0.0, "unused_experts": 1.0}


def test_adapters_are_on_attention_alone() -> None:
    lm = tiny_lm("qwen3_moe")
    add_lora(lm, LoraSpec(4, 8.0), "tiny", meta=False)
    adapted = {name.rpartition(".lora_")[0].rpartition(".")[2] for name, p in lm.named_parameters() if p.requires_grad}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ModelError, match="no linear layer 'down_proj'"):
        add_lora(tiny_lm("qwen3_moe"), LoraSpec(4, 8.0, "down_proj"), "tiny", meta=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts_per_tok": 7}, "7 of 6 experts cannot be chosen"),
        ({"decoder_sparse_step": 2}, "only some of its layers have experts"),
        ({"mlp_only_layers": [0]}, "only some of its layers have experts"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    folder = save_tiny(tmp_path / "mixture", "qwen3_moe")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError) as refused:
        read_config(str(folder))
    assert says in refused.value.message


def test_a_mixture_without_one_expert_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_tiny(tmp_path / "mixture", "qwen3_moe")
    check_model(str(folder))
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.experts.3.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"experts\.3\.up_proj\.weight, which config\.json requires"):
        check_model(str(folder))


def test_a_tiny_mixture_is_made(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", experts=4)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["num_experts_per_tok"]) == ("qwen3_moe", 2)
    check_model(str(folder))
    with pytest.raises(ConfigError, match="--experts = 1 is less than 2; give 2 or more, or 0"):
        make_tiny_model(tmp_path / "other", experts=1)
