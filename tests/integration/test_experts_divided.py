"""A mixture of experts on gloo groups of one, two and four processes, divided in each way that they allow: by rows,
tokens and experts. What is divided trains, is streamed, saved and clipped as on one process."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_model_sharded import CPU, ROWS, free_port

from rlcli.cluster.dispatch import first_per_data_rank, sum_by_key
from rlcli.model.io.model_state import save_state
from rlcli.model.lora import LoraSpec
from rlcli.model.parallel.weight_delta import LastSent, WeightCopy
from rlcli.model.tensor_names import named_weights
from tests.model_fixtures import Row, save_tiny

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
FOUR = pytest.param(4, marks=pytest.mark.exhaustive)
ALIKE: list[Row] = [*ROWS, *((np.concatenate([ROWS[0][0][:9], tokens[:20]]), 9) for tokens, _ in ROWS[1:4])]
"""With three samples of one prompt, which is packed once where they meet."""
FORWARD = {"temperature": 0.8, "want_entropy": True}
OTHERS = ("mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
ADAPTER = LoraSpec(rank=4, alpha=8.0, targets="all-linear,experts")


def layouts(world: int) -> list[tuple[int, int, int]]:
    """replicate, context, expert; six experts are not for four ranks."""
    sizes = [(one, two, three) for one in (1, 2) for two in (1, 2) for three in (1, 2, 3) if world > 1 or three == 1]
    return [way for way in sizes if world % (way[0] * way[1]) == 0 and world // way[0] % way[2] == 0]


def loss(_: Any, outputs: Any) -> Any:
    term = (outputs.log_probs + 0.1 * outputs.entropy).square().sum() / 100
    return term, {"loss": term.detach().double()}


def micro(own: list[Row]) -> Any:
    from rlcli.model.packed import dummy, pack

    return SimpleNamespace(packed=pack(own, CPU) if own else dummy(CPU), empty=not own)


def divided(rank: int, world: int, base: str, folder: Path) -> dict[str, dict[str, Any]]:
    """By layout and kind of model: what `trained` and `moved` return."""
    from rlcli.config.schema import RunConfig
    from rlcli.model.parallel.parallel_dims import ParallelDims
    from rlcli.training.worker.fsdp_backend import FsdpLoader

    config = RunConfig.model_validate({"train": {"max_grad_norm": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.1}})
    recomputing = config.changed(model={"gradient_checkpointing": True})
    # Experts with biases have no adapters.
    adapter = replace(ADAPTER, targets="all-linear") if Path(base).name == "gpt_oss" else ADAPTER
    found: dict[str, dict[str, Any]] = {}
    for place, (replicate, context, expert) in enumerate(layouts(world)):
        dims = ParallelDims.of(world, replicate, context, expert)
        rows = ALIKE[dims.data_rank(rank) :: dims.data_size]
        together, apart = [micro(rows)], [micro(rows[:3]), micro(rows[3:])]  # of four ranks, some have no fourth
        how = recomputing if place % 2 else config
        other = ParallelDims.of(world, 1, 1, layouts(world)[-1][2] if expert == 1 else 1)

        def load(dims: ParallelDims = dims, how: RunConfig = how, dtype: Any = torch.float32, **options: Any) -> Any:
            torch.manual_seed(0)
            return FsdpLoader(how, dtype, CPU, dims)("policy", base, **options)

        way, same = (
            f"{dims.replicate} × {dims.shard} × {dims.context} × {dims.expert}",
            {"data_rank": dims.data_rank(rank)},
        )
        policy, last, copy = load(), LastSent(), WeightCopy()
        copy_changes(policy, last, copy)
        found[f"{way}, policy"] = trained(policy, together, apart) | same
        copy_changes(policy, last, copy)
        found[f"{way}, policy"]["copied"] = (dict(copy.named()), copy.differences(last.sent())) if rank == 0 else None
        found[f"{way}, policy"] |= moved(policy, load(other), together, folder / f"state-{place}")
        if expert in (world, 1):
            found[f"{way}, adapter"] = trained(load(lora=adapter), together, apart) | same
            for dtype in (torch.bfloat16, torch.float16):
                half = load(how=recomputing, dtype=dtype)
                found[f"{way}, {dtype}"] = {"sums": [update(half, apart)]} | same
    return found


def update(backend: Any, micros: list[Any]) -> dict[str, float]:
    """One optimizer step."""
    for micro, outputs in backend.forward(micros, **FORWARD):
        backend.backward(*loss(micro, outputs))
    sums: dict[str, float] = backend.step(1e-2)
    return sums


def trained(backend: Any, together: list[Any], apart: list[Any]) -> dict[str, Any]:
    """What an update of one micro-batch and two of two report; the weights after the first and the last."""
    sums = [update(backend, together)]
    first = weights_of(backend)
    sums += [update(backend, apart) for _ in range(2)]
    return {"sums": sums, "first": first, "weights": weights_of(backend)}


def copy_changes(backend: Any, last: LastSent, copy: WeightCopy) -> None:
    for bucket in last.changes(named_weights(backend.model.lm), torch.float32):
        copy.take(bucket)


def moved(backend: Any, other: Any, batches: list[Any], folder: Path) -> dict[str, Any]:
    """Save the state and load it into `other`, of another layout; then an update of both."""
    save_state(backend.state("policy"), {}, folder, dist.group.WORLD)
    dist.barrier()
    other.load_state(folder, "policy")
    loaded = weights_of(other)
    return {"loaded": loaded, "then": [update(model, batches) for model in (backend, other)]}


def weights_of(backend: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.stream_weights()}


def child(rank: int, world: int, port: int, base: str, out: str) -> None:
    from rlcli.model.parallel import fsdp_sharding

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    fsdp_sharding.WHOLE_BYTES = 0
    torch.save(divided(rank, world, base, Path(out)), Path(out) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(
    scope="module",
    params=["qwen3_moe", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in OTHERS)],
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A number of processes → what each found. Run once a family."""
    root = tmp_path_factory.mktemp("experts")
    base = save_tiny(root / request.param, kind=request.param)

    @functools.cache
    def found(world: int) -> list[dict[str, Any]]:
        out = root / f"world{world}"
        out.mkdir()
        mp.spawn(child, (world, free_port(), str(base), str(out)), nprocs=world)
        return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(world)]

    return found


def assert_alike(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """ranks: what `divided` found on each. alone: on one rank."""
    for way, first in ranks[0].items():
        expected = alone[f"1 × 1 × 1, {way.rpartition(', ')[2]}"]
        for number, step in enumerate(expected["sums"]):
            sums = [rank[way]["sums"][number] for rank in ranks]
            found = sum_by_key(first_per_data_rank(sums, [rank[way]["data_rank"] for rank in ranks]))
            assert (found["loss"], found["grad_norm"]) == pytest.approx((step["loss"], step["grad_norm"]), rel=1e-5)
        for rank in ranks:
            for name, weight in rank[way]["weights"].items():
                assert torch.equal(weight, first["weights"][name]), (way, name)
                off = (weight - expected["weights"][name]).norm()
                assert off <= 1e-4 * expected["weights"][name].norm(), (way, name)


@pytest.mark.parametrize("world", [2, FOUR])
def test_ranks_that_divide_experts_train_as_one(runs: Any, world: int) -> None:
    assert any(way.startswith("1 × 1 × 2 × 2" if world == 2 else "2 × 1 × 2 × 2") for way in runs(world)[0])
    alone = {f"1 × 1 × 1, {way.rpartition(', ')[2]}": one for way, one in runs(1)[0].items()}
    assert_alike([{way: one for way, one in rank.items() if "weights" in one} for rank in runs(world)], alone)


@pytest.mark.parametrize("world", [1, 2, FOUR])
def test_what_is_saved_loads_into_another_layout(runs: Any, world: int) -> None:
    """And trains on there as here."""
    for rank in runs(world):
        for way, one in rank.items():
            if not way.endswith("policy"):
                continue
            assert all(torch.equal(one["loaded"][name], tensor) for name, tensor in one["weights"].items()), way
            here, there = one["then"]
            assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-5), way


@pytest.mark.parametrize("world", [1, 2, FOUR])
def test_changes_of_divided_experts_reach_the_engines_copy(runs: Any, world: int) -> None:
    copied = {way: one for way, one in runs(world)[0].items() if one.get("copied")}
    assert copied
    for way, one in copied.items():
        tensors, differences = one["copied"]
        assert not differences, way
        assert all(torch.equal(tensors[name], weight) for name, weight in one["weights"].items()), way


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
def test_in_16_bits_it_is_the_same_but_for_rounding(runs: Any, dtype: str) -> None:
    """Some tokens may have another expert for it."""
    (whole,) = runs(1)[0][f"1 × 1 × 1 × 1, {dtype}"]["sums"]
    ways = [way for way in runs(2)[0] if way.endswith(dtype)]
    assert {way.rpartition(" × ")[2][0] for way in ways} == {"1", "2"}
    for way in ways:
        ranks = [rank[way] for rank in runs(2)]
        found = sum_by_key(
            first_per_data_rank([rank["sums"][0] for rank in ranks], [rank["data_rank"] for rank in ranks])
        )
        for name in ("loss", "grad_norm"):
            assert found[name] == pytest.approx(whole[name], rel=0.02), (way, name)
        assert ("gradient_scale" in found) == (dtype == "torch.float16")
