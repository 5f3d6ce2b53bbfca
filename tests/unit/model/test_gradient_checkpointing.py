"""Activations that are worked out again, or wait in host memory, give the same gradients to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcli.errors import SetupError
from rlcli.model.io import loading
from rlcli.model.lora import LoraSpec

CPU = torch.device("cpu")


def gradients(model: Any) -> dict[str, Tensor]:
    """Of a pack of two sequences; checks that the graph held something."""
    from rlcli.model.packed import pack

    packs = pack([(np.arange(5, 25, dtype=np.int32), 4), (np.arange(40, 49, dtype=np.int32), 3)], CPU)
    outputs = model(packs, temperature=0.9, want_entropy=True)
    (outputs.log_probs.sum() + 0.1 * outputs.entropy.sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def load(mesh: Any, base: str, checkpointing: loading.Checkpointing, dtype: torch.dtype, lora: bool) -> Any:
    torch.manual_seed(0)
    adapter = LoraSpec(rank=4, alpha=8.0) if lora else None
    return loading.load_policy(
        base, dtype=dtype, device=CPU, mesh=mesh, lora=adapter, gradient_checkpointing=checkpointing
    )


def same(first: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    return first.keys() == other.keys() and all(torch.equal(bits(first[name]), bits(other[name])) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [False, True])
def test_gradients_are_the_same_to_the_bit(
    mesh: Any, base: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, lora: bool
) -> None:
    plain = gradients(load(mesh, base, False, dtype, lora))
    assert plain
    assert same(plain, gradients(load(mesh, base, True, dtype, lora)))
    assert same(plain, gradients(load(mesh, base, "offload", dtype, lora))), "on a CPU that is the same as true"

    moved: list[Tensor] = []

    class SavedInHostMemory(torch.autograd.graph.saved_tensors_hooks):
        """In the place of pinned memory, which needs a GPU: a copy, kept beside the graph."""

        def __init__(self, **_: Any) -> None:
            super().__init__(self.pack, moved.__getitem__)

        def pack(self, tensor: Tensor) -> int:
            moved.append(tensor.clone())
            return len(moved) - 1

    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", SavedInHostMemory)
    model = load(mesh, base, False, dtype, lora)
    loading._checkpoint_layers(model.lm, offload=True)
    assert same(plain, gradients(model))
    layers = len(model.lm.base_model.layers)
    assert [tensor.shape for tensor in moved] == [(1, 29, model.lm.config.hidden_size)] * layers, "inputs, nothing else"


def test_a_transformers_that_cannot_move_them_is_named() -> None:
    class Older:
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None: ...

    loading._checkpoint_layers(Older(), offload=False)
    with pytest.raises(SetupError, match=r"needs transformers 5\.17"):
        loading._checkpoint_layers(Older(), offload=True)
