"""One shard in bfloat16: weights that are cast once an update give the bits of weights that are cast in each pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli.model.parallel.fsdp_sharding import casts_once
from rlcli.model.parallel.parallel_dims import ParallelDims
from tests.unit.training.worker.test_policy_role import HALF, batch_of, configured, fsdp, role_of


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are the shards themselves."""
    monkeypatch.setattr("ray.get", lambda reference, *, timeout: reference)


@pytest.fixture(params=["layers", "whole"], autouse=True)
def wrapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Wraps the tiny model with FSDP2, by layers or as a whole."""
    if request.param == "layers":
        monkeypatch.setattr("rlcli.model.parallel.fsdp_sharding.WHOLE_BYTES", 0)
    return str(request.param)


class Casts(TorchDispatchMode):
    """Counts matrices of the master weights that are cast to bfloat16. masters: where these are."""

    def __init__(self, masters: set[int]) -> None:
        super().__init__()
        self.masters, self.count = masters, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.count += args[0].untyped_storage().data_ptr() in self.masters
        return function(*args, **kwargs)


def local(tensor: Any) -> torch.Tensor:
    shard: torch.Tensor = tensor.to_local()
    return shard.detach()


def of_updates(mesh: Any, base: str, once: bool) -> tuple[list[Any], dict[str, torch.Tensor], int, int]:
    """The sums of two updates, the weights after them, the casts of the second, and its micro-batches."""
    config = configured(base, train={"tokens_per_microbatch": 24})
    role = role_of(config, mesh, torch.bfloat16)
    fsdp(role).casts_once = once
    batch = batch_of(role, config)
    sums = [role.update(batch, 0, HALF)]
    model = fsdp(role).model
    with Casts({local(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}) as casts:
        sums.append(role.update(batch, 0, HALF))
    gathered = [name for name, parameter in model.named_parameters() if parameter.dtype != torch.float32]
    assert not gathered, "the optimizer steps the master weights"
    role.compute_old_log_probs(batch)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    weights = {name: local(parameter).clone() for name, parameter in model.named_parameters()}
    return sums, weights, casts.count, len(batch.minibatches[0])


def test_weights_that_stay_cast_give_the_same_bits(mesh: Any, base: str, wrapped: str) -> None:
    expected, reference, many, micros = of_updates(mesh, base, once=False)
    sums, weights, casts, _ = of_updates(mesh, base, once=True)
    assert micros > 2
    assert sums == expected
    assert weights.keys() == reference.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, reference[name]), name
    assert casts == len(weights)
    assert many >= micros * casts


def test_weights_stay_cast_on_a_gpu_of_one_shard(mesh: Any, base: str) -> None:
    alone, several = ParallelDims.of(1, 1), ParallelDims.of(2, 1)
    model = fsdp(role_of(configured(base), mesh, torch.bfloat16)).model
    assert isinstance(model, FSDPModule)
    assert casts_once(model, alone, "cuda")
    assert casts_once(model, ParallelDims.of(2, 2), "cuda")
    assert not casts_once(model, several, "cuda")
    assert not casts_once(model, alone, "cpu")
    assert not casts_once(fsdp(role_of(configured(base), mesh)).model, alone, "cuda"), "it is not wrapped in float32"
    adapted = fsdp(role_of(configured(base, lora={"rank": 4}), mesh, torch.bfloat16)).model
    assert not casts_once(adapted, alone, "cuda"), "its base would be there twice"
