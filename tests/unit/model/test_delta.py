"""The changes of each shard since the last sync: a receiver that writes them holds the same bits as the sender."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from rlcli.model.parallel.weight_delta import INDEX, VALUE, LastSent, WeightCopy
from rlcli.model.weight_check.checksum import INTEGERS, Checksums

SHAPES = {"embed": (37, 16), "up": (48, 16), "norm": (16,), "short": (1, 16), "scale": ()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.02))


def same_bits(first: Tensor, other: Tensor) -> bool:
    return first.dtype == other.dtype and first.view(INTEGERS[first.itemsize]).equal(
        other.view(INTEGERS[first.itemsize])
    )


def whole(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    from torch.distributed.tensor import DTensor

    return {
        name: (p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone()).to(dtype)
        for name, p in model.named_parameters()
    }


def synced(model: nn.Module, last: LastSent, copy: WeightCopy, dtype: torch.dtype) -> list[str]:
    """One sync, checked; returns the names of what was sent."""
    sent = [entry for bucket in last.changes(model.named_parameters(), dtype, 2048) for entry in bucket]
    copy.take((name, tensor.clone()) for name, tensor in sent)
    expected, sums = whole(model, dtype), Checksums()
    for _ in sums.of(expected.items()):
        pass
    assert last.sent() == sums.sent()
    assert copy.differences(last.sent()) == []
    held = dict(copy.named())
    assert held.keys() == expected.keys()
    assert all(same_bits(held[name], tensor) for name, tensor in expected.items())
    return [name for name, _ in sent]


def change(model: nn.Module, step: int) -> None:
    """A few values of `embed` and `up`, most of `norm`, and one of `scale`, to another bit each, and to −0 and NaN."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for name, share in (("embed", 0.05), ("up", 0.1), ("norm", 0.9)):
            parameter = getattr(model, name)
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.mul_(torch.where(torch.rand(local.shape, generator=generator) < share, 1.5, 1.0))
        first = model.up.to_local() if hasattr(model.up, "to_local") else model.up
        if first.numel():
            first.view(-1)[0], first.view(-1)[1] = -0.0 if step % 2 else 0.0, float("nan")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_copy_follows_bit_by_bit_over_several_updates(dtype: torch.dtype) -> None:
    model, last, copy = Model(), LastSent(), WeightCopy()
    assert set(synced(model, last, copy, dtype)) == set(SHAPES)
    assert (last.changed, last.total) == (sum(map(torch.Size.numel, map(torch.Size, SHAPES.values()))),) * 2
    assert synced(model, last, copy, dtype) == []
    assert last.changed == 0
    for step in range(3):
        change(model, step)
        sent = synced(model, last, copy, dtype)
        assert {"norm", INDEX + "up", VALUE + "up", INDEX + "embed"} <= set(sent), "more than a quarter: whole"
        assert not {"up", "embed", "short"} & set(sent)
        assert 0 < last.changed < 0.3 * last.total


def test_updates_of_adam_at_a_small_rate_change_few_values_of_bfloat16() -> None:
    model, last, copy = Model(), LastSent(), WeightCopy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    synced(model, last, copy, torch.bfloat16)
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        synced(model, last, copy, torch.bfloat16)
        assert 0 < last.changed < 0.1 * last.total


def test_what_did_not_arrive_is_found_and_sent_again_whole() -> None:
    model, last, copy = Model(), LastSent(), WeightCopy()
    synced(model, last, copy, torch.bfloat16)
    dict(copy.named())["up"].view(-1).view(torch.int16)[7] ^= 1
    change(model, 0)
    copy.take(entry for bucket in last.changes(model.named_parameters(), torch.bfloat16) for entry in bucket)
    assert copy.differences(last.sent()) == ["up"]
    last.forget()
    assert set(synced(model, last, copy, torch.bfloat16)) == set(SHAPES)


@pytest.mark.parametrize(
    "lost",
    [
        [],
        [("up", torch.zeros(3, 16).bfloat16())],
        [("up", torch.zeros(48, 16))],
        [(INDEX + "up", torch.tensor([48 * 16])), (VALUE + "up", torch.zeros(1).bfloat16())],
    ],
    ids=["nothing", "too short", "another type", "beyond the end"],
)
def test_changes_that_do_not_fit_what_is_there_are_reported(lost: list[tuple[str, Tensor]]) -> None:
    model, last, copy = Model(), LastSent(), WeightCopy()
    for _ in last.changes(model.named_parameters(), torch.bfloat16):
        pass
    if lost:
        synced(model, LastSent(), copy, torch.bfloat16)
        copy.take(lost)
    change(model, 0)
    copy.take(parameter for bucket in last.changes(model.named_parameters(), torch.bfloat16) for parameter in bucket)
    assert "up" in copy.differences(last.sent())


def on_rank(rank: int, world: int, replicate: int, path: str) -> None:
    from torch.distributed.fsdp import fully_shard

    from rlcli.model.parallel.parallel_dims import ParallelDims

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=world)
    model = Model()
    model.scale = nn.Parameter(torch.randn(1))  # FSDP2 shards no scalar
    fully_shard(model, mesh=ParallelDims.of(world, replicate).mesh("cpu"))
    last, copy = LastSent(), WeightCopy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    sent = [synced(model, last, copy, torch.bfloat16)]
    for step in range(3):
        for name, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step + len(name)))
            parameter.grad = torch.distributed.tensor.distribute_tensor(
                gradient, parameter.device_mesh, parameter.placements
            )
        optimizer.step()
        sent.append(synced(model, last, copy, torch.bfloat16))
    if rank == 0:
        Path(path).write_text(json.dumps([sent, last.changed, last.total]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("world", "replicate"), [pytest.param(3, 1, marks=pytest.mark.long), (4, 2)])
def test_shards_of_several_ranks_add_up_to_the_whole(world: int, replicate: int, tmp_path: Path) -> None:
    """Every rank holds a copy here, and each is checked; copies of a replicated model count once."""
    path = tmp_path / "found.json"
    mp.spawn(on_rank, (world, replicate, str(path)), nprocs=world)
    results: Any = json.loads(path.read_text())
    (first, *later_syncs), changed, total = results
    assert set(first) == set(SHAPES)
    assert all(INDEX + "up" in sent for sent in later_syncs)
    assert 0 < changed < total == 37 * 16 + 48 * 16 + 16 + 16 + 1
