"""Weights of GPT-OSS that are written into vLLM's parameters: each rank's part, in vLLM's order, and compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlcli.model.weight_check.checksum import Checksums
from rlcli.model.weight_check.engine_weights import LayoutRecorder, Part, compare
from rlcli.rollout.vllm.hooks.written_weights import WrittenWeights

EXPERTS, HIDDEN, WIDE, HEADS = 3, 4, 6, 4
LAYER = "model.layers.0."


def sent(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "self_attn.sinks": (HEADS,),
        "mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * WIDE),
        "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * WIDE),
        "mlp.experts.down_proj": (EXPERTS, WIDE, HIDDEN),
        "mlp.experts.down_proj_bias": (EXPERTS, HIDDEN),
        "mlp.router.weight": (EXPERTS, HIDDEN),
    }
    return {LAYER + name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def engine(ranks: int, inner: str = "experts.routed_experts") -> nn.Module:
    """As vLLM has one rank's part."""
    shapes = {
        "attn.sinks": (HEADS // ranks,),
        f"mlp.{inner}.w13_weight": (EXPERTS, 2 * WIDE // ranks, HIDDEN),
        f"mlp.{inner}.w13_bias": (EXPERTS, 2 * WIDE // ranks),
        f"mlp.{inner}.w2_weight": (EXPERTS, HIDDEN, WIDE // ranks),
        f"mlp.{inner}.w2_bias": (EXPERTS, HIDDEN),
        "mlp.router.weight": (EXPERTS, HIDDEN),
    }
    model = nn.Module()
    model.config = SimpleNamespace(model_type="gpt_oss")
    for name, shape in shapes.items():
        *path, leaf = (LAYER + name).split(".")
        module = model
        for part in path:
            module = (
                module._modules.get(part) or module.register_module(part, nn.Module()) or module.get_submodule(part)
            )
        module.register_parameter(leaf, nn.Parameter(torch.full(shape, torch.nan), requires_grad=False))
    return model


def load(model: nn.Module, weights: Any) -> None:
    """Copies the tensors, as vLLM's own loader does."""
    for name, tensor in weights:
        model.get_parameter(name).data.copy_(tensor)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("inner", ["experts.routed_experts", "experts"])
def test_each_rank_holds_its_part_and_all_of_them_are_compared(ranks: int, inner: str) -> None:
    engines, layouts = [engine(ranks, inner) for _ in range(ranks)], []
    first, second = sent(0), sent(1)
    for rank, model in enumerate(engines):
        written = WrittenWeights(model, rank, ranks)
        with LayoutRecorder(model) as recorder:
            load(model, written.others(recorder.observe(first.items(), written.parameters, written.empty)))
        layouts.append(recorder.layout())
    assert all(layout.untouched == [] for layout in layouts)
    assert not any(layout.changed for layout in layouts)

    def verified(weights: dict[str, Tensor]) -> Any:
        sums = Checksums()
        sums_of = dict(sums.of(weights.items()))
        assert sums_of.keys() == weights.keys()

        def held(model: nn.Module) -> Any:
            return lambda owner, shape: [model.get_parameter(owner)]

        parts: list[list[Part]] = [
            layout.parts(held(model), sums.sent()) for layout, model in zip(layouts, engines, strict=True)
        ]
        return compare(sums.sent(), parts)

    assert verified(first) == (len(first), 0, [])
    up = first[f"{LAYER}mlp.experts.gate_up_proj"]
    held = torch.cat([model.get_parameter(f"{LAYER}mlp.{inner}.w13_weight") for model in engines], 1)
    assert torch.equal(held, up.transpose(1, 2))
    biases = [model.get_parameter(f"{LAYER}mlp.{inner}.w2_bias") for model in engines]
    assert torch.equal(sum(biases), first[f"{LAYER}mlp.experts.down_proj_bias"]), "it is added once"
    for rank, model in enumerate(engines):
        load(model, WrittenWeights(model, rank, ranks).others(second.items()))
    assert verified(second) == (len(second), 0, [])
    assert len(verified(first).differences) == len(first)


def test_other_models_are_left_to_vllm() -> None:
    model = engine(1)
    model.config = SimpleNamespace(model_type="qwen3_moe")
    weights = sent(0)
    assert dict(WrittenWeights(model).others(weights.items())).keys() == weights.keys()
