"""Tensors offloaded to host memory return bit for bit, also shared ones, and their memory is free in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcli.model.io.model_state import copied, load_state, save_state, trained_state
from rlcli.model.lora import LoraSpec
from rlcli.model.parallel.offload import KINDS, Offload

CPU = torch.device("cpu")


class Learning:
    """A sharded policy that trains on a fixed pack, whose states `offload` sends away by the name `policy`."""

    def __init__(
        self, mesh: Any, path: str, kinds: str, lora: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        from rlcli.model.io.loading import load_policy
        from rlcli.model.optim import build_optimizer

        torch.manual_seed(0)
        options: dict[str, Any] = {"dtype": dtype, "device": CPU, "mesh": mesh}
        self.model = load_policy(path, lora=LoraSpec(rank=4, alpha=8.0) if lora else None, **options)
        self.optimizer = build_optimizer(self.model, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
        self.offload = Offload(KINDS[kinds], CPU)
        self.offload.add("policy", self.model, self.optimizer)

    def step(self) -> None:
        from rlcli.model.packed import pack

        self.offload.to_device("policy", "policy.optimizer")
        tokens = torch.arange(5, 25, dtype=torch.int32).numpy()
        self.model(pack([(tokens, 4)], CPU), temperature=1.0, want_entropy=True).log_probs.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        return copied(trained_state({"policy": (self.model, self.optimizer)}), self.offload.copied)

    def held_bytes(self) -> dict[str, int]:
        local = [getattr(p, "to_local", lambda p=p: p)() for p in self.model.parameters()]
        values = [v for state in self.optimizer.state.values() for v in state.values()]
        states = [getattr(v, "to_local", lambda v=v: v)() for v in values]
        return {
            "model": sum(tensor.untyped_storage().nbytes() for tensor in local),
            "optimizer": sum(tensor.untyped_storage().nbytes() for tensor in states),
        }


def equal(first: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    return first.keys() == other.keys() and all(torch.equal(bits(first[name]), bits(other[name])) for name in first)


@pytest.mark.parametrize("kinds", ["optimizer", "all"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_bitwise_the_same_with_everything_offloaded(
    mesh: Any, base: str, kinds: str, lora: bool, dtype: torch.dtype
) -> None:
    """In bfloat16 one rank is sharded like many, in float32 it is not."""
    plain, moved = Learning(mesh, base, "none", lora, dtype), Learning(mesh, base, kinds, lora, dtype)
    assert any(isinstance(p, DTensor) for p in plain.model.parameters()) == (dtype == torch.bfloat16)
    for _ in range(4):
        moved.offload.to_host(*moved.offload.names)
        for learner in (plain, moved):
            learner.step()
    moved.offload.to_host(*moved.offload.names)
    assert equal(plain.state(), moved.state()), "its state can be saved while it is away"
    moved.offload.to_device(*moved.offload.names)
    assert equal(plain.state(), moved.state())


def test_what_is_away_takes_no_memory_on_the_device(mesh: Any, base: str) -> None:
    learning = Learning(mesh, base, "all")
    learning.step()
    resident = learning.held_bytes()
    learning.offload.to_host("policy.optimizer")
    assert learning.held_bytes() == {"model": resident["model"], "optimizer": 0}
    learning.offload.to_host("policy")
    assert learning.held_bytes() == {"model": 0, "optimizer": 0}
    learning.offload.to_host("policy")  # where it is already
    learning.offload.to_device("policy", "policy.optimizer")
    assert learning.held_bytes() == resident


def test_only_what_the_setting_names_is_sent_away(mesh: Any, base: str) -> None:
    none, optimizer = Learning(mesh, base, "none"), Learning(mesh, base, "optimizer")
    for learning in (none, optimizer):
        learning.step()
        resident = learning.held_bytes()
        learning.offload.to_host("policy", "policy.optimizer", "critic")
        assert learning.held_bytes()["model"] == resident["model"] > 0
    assert none.held_bytes() == resident
    assert none.offload.names == ()
    assert optimizer.held_bytes()["optimizer"] == 0


def test_the_base_beneath_an_adapter_is_copied_once(mesh: Any, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learning = Learning(mesh, base, "all", lora=True)
    sizes: list[int] = []
    original = Tensor.copy_

    def counted(self: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sizes.append(source.nbytes)
        return original(self, source, *args, **kwargs)

    monkeypatch.setattr(Tensor, "copy_", counted)
    learning.offload.to_host("policy")
    first, sizes = sum(sizes), []
    learning.offload.to_device("policy")
    back, sizes = sum(sizes), []
    learning.offload.to_host("policy")
    assert first == back == sum(p.nbytes for p in learning.model.parameters())
    assert sum(sizes) == sum(p.nbytes for p in learning.model.parameters() if p.requires_grad)


def test_a_checkpoint_is_loaded_over_what_was_away(mesh: Any, base: str, tmp_path: Path) -> None:
    saved, loaded = Learning(mesh, base, "all"), Learning(mesh, base, "all")
    for _ in range(2):
        saved.step()
    saved.offload.to_host(*saved.offload.names)
    save_state(saved.state(), {}, tmp_path / "state", dist.group.WORLD)
    loaded.step()
    loaded.offload.to_host(*loaded.offload.names)
    loaded.offload.to_device(*loaded.offload.names)
    load_state({"policy": (loaded.model, loaded.optimizer)}, tmp_path / "state")
    assert equal(saved.state(), loaded.state())
    loaded.offload.to_host(*loaded.offload.names)
    assert equal(saved.state(), loaded.state())
    for learning in (saved, loaded):
        learning.step()
    assert equal(saved.state(), loaded.state())
