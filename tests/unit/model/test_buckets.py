"""Whole parameters out of shards, on real gloo groups of one and of two processes, launched once."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from rlcli.model.parallel import buckets as module

pytestmark = pytest.mark.long
SHAPES = [(8, 3), (7, 5), (1,), (2, 2, 2), (5,), (3, 4), (2,), (16, 16), (1, 9)]
"""Some divide by no number of ranks, and of some there are fewer rows than ranks."""
WORLD = 2
LIMIT = 400
"""Bytes: in float32 the largest is larger, and two or three others go together."""


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])


def expected(dtype: torch.dtype) -> list[torch.Tensor]:
    return [parameter.detach().to(dtype) for parameter in Odd().parameters()]


def gathered(parameters: Any, dtype: torch.dtype, limit: int) -> dict[str, Any]:
    """The output of `buckets`, the number of collectives it takes, and the order of collectives and buckets."""
    events: list[str] = []
    original = module.all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        events.append("gather")
        return original(*args, **kwargs)

    module.all_gather = counted
    collected: list[list[Any]] = []
    try:
        for bucket in module.buckets(parameters, dtype, limit):
            events.append("use")
            collected.append(bucket)
    finally:
        module.all_gather = original
    sizes = [sum(tensor.numel() * tensor.element_size() for _, tensor in bucket) for bucket in collected]
    pairs = [pair for bucket in collected for pair in bucket]
    return {"names": [n for n, _ in pairs], "tensors": [t for _, t in pairs], "sizes": sizes, "events": events}


def child(rank: int, port: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    grid = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("ranks", "alone"))
    one_copy = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("replicate", "shard"))
    results = {"alone": all_of(grid["alone"]), "ranks": all_of(grid["ranks"])}
    results |= {"copies": all_of(grid), "one copy": all_of(one_copy)}
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def all_of(mesh: Any) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    model = Odd()
    fully_shard(model, mesh=mesh)
    parameters = list(model.named_parameters())
    plain = torch.arange(6.0).reshape(2, 3)
    copied = [Replicate()] * (mesh.ndim - 1)
    mixed = [
        parameters[0],
        ("replicated", distribute_tensor(plain, mesh, [*copied, Replicate()])),
        ("columns", distribute_tensor(plain, mesh, [*copied, Shard(1)])),
        ("plain", plain),
        *parameters[1:],
    ]
    full_tensors = [tensor for bucket in module.buckets(parameters, torch.float32) for _, tensor in bucket]
    return {
        "float": gathered(parameters, torch.float32, LIMIT),
        "half": gathered(parameters, torch.bfloat16, LIMIT),
        "one": gathered(parameters, torch.float32, 1 << 20),
        "mixed": gathered(mixed, torch.float32, 1 << 20),
        "shared": [
            tensor.untyped_storage().data_ptr() == parameter.to_local().untyped_storage().data_ptr()
            for tensor, (_, parameter) in zip(full_tensors, parameters, strict=True)
        ],
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("buckets")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(child, (port, str(folder)), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def divided(result: dict[str, Any]) -> bool:
    return "gather" in result["one"]["events"]


@pytest.fixture(params=["alone", "ranks", "copies", "one copy"])
def results(request: pytest.FixtureRequest, ranks: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each rank, in groups of one or of two, and with a mesh of two dimensions."""
    return [rank[request.param] for rank in ranks]


@pytest.mark.parametrize(("name", "dtype"), [("float", torch.float32), ("half", torch.bfloat16)])
def test_every_rank_gets_the_bits_of_every_parameter_in_order(results: Any, name: str, dtype: torch.dtype) -> None:
    for result in results:
        assert result[name]["names"] == [f"all.{index}" for index in range(len(SHAPES))]
        for tensor, wanted in zip(result[name]["tensors"], expected(dtype), strict=True):
            assert tensor.dtype == dtype
            assert torch.equal(tensor, wanted)


def test_a_collective_serves_many_parameters_and_one_rank_needs_none(ranks: Any) -> None:
    for rank in ranks:
        for layout, divided_ in (("alone", "ranks"), ("copies", "one copy")):  # of two copies, each rank has one
            assert rank[layout]["one"]["events"].count("gather") == 0
            assert rank[divided_]["one"]["events"].count("gather") == 1
            assert 1 < rank[divided_]["float"]["events"].count("gather") < len(SHAPES)


def test_a_bucket_is_bounded_and_the_next_is_under_way_while_it_is_used(results: Any) -> None:
    largest = 16 * 16 * 4
    for result in results:
        assert all(size <= LIMIT or size == largest for size in result["float"]["sizes"])
        events = result["float"]["events"]
        for index, event in enumerate(events):
            if event == "use" and divided(result):
                under_way = events[:index].count("gather") - events[:index].count("use")
                assert under_way == (2 if index < len(events) - 1 else 1)


def test_one_rank_hands_its_parameters_over_as_they_are(results: Any) -> None:
    for result in results:
        assert all(result["shared"]) is not divided(result)
        assert any(result["shared"]) is not divided(result)


def test_what_is_not_divided_by_rows_comes_in_its_place(results: Any) -> None:
    plain = torch.arange(6.0).reshape(2, 3)
    for result in results:
        assert result["mixed"]["names"][:5] == ["all.0", "replicated", "columns", "plain", "all.1"]
        assert all(torch.equal(tensor, plain) for tensor in result["mixed"]["tensors"][1:4])
        assert all(
            torch.equal(actual, wanted)
            for actual, wanted in zip(result["mixed"]["tensors"][4:], expected(torch.float32)[1:], strict=True)
        )


def test_one_row_of_each_rank_comes_without_gaps() -> None:
    """Such as 64 sinks over 64 ranks: what checks the engine's weights reads whole memory only."""
    rows = module.Rows(None, begins=(0, 1, 2), counts=(1, 1, 1), rank=0, ranks=None)  # type: ignore[arg-type]
    gathered = torch.arange(15.0).view(3, 5)
    joined = rows.joined(gathered[:, 2:3])
    assert joined.is_contiguous()
    assert joined.tolist() == [2.0, 7.0, 12.0]
