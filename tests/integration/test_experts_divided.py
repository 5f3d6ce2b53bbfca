"""A mixture of experts on gloo groups of one, two and four processes, in each parallel layout that they allow: by rows,
tokens and experts. The sharded model trains, is streamed, saved and clipped as on one process."""

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
from tests.model_fixtures import Row, save_tiny, tiny_lm

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
FOUR = pytest.param(4, marks=pytest.mark.exhaustive)
ALIKE: list[Row] = [*ROWS, *((np.concatenate([ROWS[0][0][:9], tokens[:20]]), 9) for tokens, _ in ROWS[1:4])]
"""Includes three samples of one prompt, which is packed once where they are in the same micro-batch."""
FORWARD = {"temperature": 0.8, "want_entropy": True}
OTHERS = ("mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
ADAPTER = LoraSpec(rank=4, alpha=8.0, targets="all-linear,experts")


def layouts(world: int, kind: str) -> list[tuple[int, int, int]]:
    """replicate, context, expert; six experts are not for four ranks, and gated DeltaNet layers have no context
    parallelism."""
    sizes = [
        (replicate, context, expert)
        for replicate in (1, 2)
        for context in ((1,) if kind == "qwen3_next" else (1, 2))
        for expert in (1, 2, 3)
        if world > 1 or expert == 1
    ]
    return [layout for layout in sizes if world % (layout[0] * layout[1]) == 0 and world // layout[0] % layout[2] == 0]


def loss(_: Any, outputs: Any) -> Any:
    term = (outputs.log_probs + 0.1 * outputs.entropy).square().sum() / 100
    return term, {"loss": term.detach().double()}


def micro(rows: list[Row]) -> Any:
    from rlcli.model.packed import dummy, pack

    return SimpleNamespace(packed=pack(rows, CPU) if rows else dummy(CPU), empty=not rows)


def divided(rank: int, world: int, base: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Results of `trained` and `moved` by layout and kind of model."""
    from rlcli.config.schema import RunConfig
    from rlcli.model.parallel.parallel_dims import ParallelDims
    from rlcli.training.worker.fsdp_backend import FsdpLoader

    config = RunConfig.model_validate({"train": {"max_grad_norm": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.1}})
    recomputing = config.changed(model={"gradient_checkpointing": True})
    # Experts with biases have no adapters.
    adapter = replace(ADAPTER, targets="all-linear") if Path(base).name == "gpt_oss" else ADAPTER
    results: dict[str, dict[str, Any]] = {}
    cases = layouts(world, Path(base).name)
    for index, (replicate, context, expert) in enumerate(cases):
        dims = ParallelDims.of(world, replicate, context, expert)
        rows = ALIKE[dims.data_rank(rank) :: dims.data_size]
        single, split = [micro(rows)], [micro(rows[:3]), micro(rows[3:])]  # of four ranks, some have no fourth
        case_config = recomputing if index % 2 else config
        other = ParallelDims.of(world, 1, 1, cases[-1][2] if expert == 1 else 1)

        def load(
            dims: ParallelDims = dims, case_config: RunConfig = case_config, dtype: Any = torch.float32, **options: Any
        ) -> Any:
            torch.manual_seed(0)
            return FsdpLoader(case_config, dtype, CPU, dims)("policy", base, **options)

        layout, rank_info = (
            f"{dims.replicate} × {dims.shard} × {dims.context} × {dims.expert}",
            {"data_rank": dims.data_rank(rank)},
        )
        policy, last, copy = load(), LastSent(), WeightCopy()
        copy_changes(policy, last, copy)
        results[f"{layout}, policy"] = trained(policy, single, split) | rank_info
        copy_changes(policy, last, copy)
        results[f"{layout}, policy"]["copied"] = (
            (dict(copy.named()), copy.differences(last.sent())) if rank == 0 else None
        )
        results[f"{layout}, policy"] |= moved(policy, load(other), single, folder / f"state-{index}")
        if expert in (world, 1):
            results[f"{layout}, adapter"] = trained(load(lora=adapter), single, split) | rank_info
            for dtype in (torch.bfloat16, torch.float16):
                half = load(case_config=recomputing, dtype=dtype)
                masters = weights_of(half, torch.float32)
                results[f"{layout}, {dtype}"] = {"masters": masters, "sums": [update(half, split)]} | rank_info
    return results


def update(backend: Any, micros: list[Any]) -> dict[str, float]:
    """One optimizer step."""
    for micro, outputs in backend.forward(micros, **FORWARD):
        backend.backward(*loss(micro, outputs))
    sums: dict[str, float] = backend.step(1e-2)
    return sums


def trained(backend: Any, single: list[Any], split: list[Any]) -> dict[str, Any]:
    """Metrics of one update with one micro-batch and two with two; the weights after the first and the last."""
    sums = [update(backend, single)]
    first = weights_of(backend)
    sums += [update(backend, split) for _ in range(2)]
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


def weights_of(backend: Any, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.model.stream_weights(dtype)}


def child(rank: int, world: int, port: int, base: str, output_folder: str) -> None:
    from rlcli.model import dithering
    from rlcli.model.parallel import fsdp_sharding

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    fsdp_sharding.WHOLE_BYTES = 0
    dithering.CHUNK = {"cpu": 1001}  # of which most parameters have several
    torch.save(divided(rank, world, base, Path(output_folder)), Path(output_folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(
    scope="module",
    params=["qwen3_moe", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in OTHERS)],
)
def kind(request: pytest.FixtureRequest) -> str:
    family: str = request.param
    return family


@pytest.fixture(scope="module")
def runs(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Number of processes → results of each rank. Run once per model family."""
    root = tmp_path_factory.mktemp("experts")
    base = save_tiny(root / kind, kind=kind)
    tiny_lm(kind).bfloat16().save_pretrained(base)  # as models are published

    @functools.cache
    def results_of(world: int) -> list[dict[str, Any]]:
        output_folder = root / f"world{world}"
        output_folder.mkdir()
        mp.spawn(child, (world, free_port(), str(base), str(output_folder)), nprocs=world)
        return [torch.load(output_folder / f"{rank}.pt", weights_only=False) for rank in range(world)]

    return results_of


def assert_alike(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """ranks: results of `divided` on each rank. alone: on one rank."""
    for layout, first in ranks[0].items():
        expected = alone[f"1 × 1 × 1, {layout.rpartition(', ')[2]}"]
        for number, step in enumerate(expected["sums"]):
            sums = [rank[layout]["sums"][number] for rank in ranks]
            summed = sum_by_key(first_per_data_rank(sums, [rank[layout]["data_rank"] for rank in ranks]))
            assert (summed["loss"], summed["grad_norm"]) == pytest.approx((step["loss"], step["grad_norm"]), rel=1e-5)
        for rank in ranks:
            for name, weight in rank[layout]["weights"].items():
                assert torch.equal(weight, first["weights"][name]), (layout, name)
                error = (weight - expected["weights"][name]).norm()
                assert error <= 1e-4 * expected["weights"][name].norm(), (layout, name)


@pytest.mark.parametrize("world", [2, FOUR])
def test_ranks_that_divide_experts_train_as_one(runs: Any, kind: str, world: int) -> None:
    divided_most = "1 × 1 × 2 × 2" if world == 2 else "2 × 1 × 2 × 2"
    if kind == "qwen3_next":
        divided_most = divided_most.replace("1 × 2 × 2", "2 × 1 × 2")
    assert any(layout.startswith(divided_most) for layout in runs(world)[0])
    alone = {f"1 × 1 × 1, {layout.rpartition(', ')[2]}": run for layout, run in runs(1)[0].items()}
    assert_alike([{layout: run for layout, run in rank.items() if "weights" in run} for rank in runs(world)], alone)


@pytest.mark.parametrize("world", [1, 2, FOUR])
def test_what_is_saved_loads_into_another_layout(runs: Any, world: int) -> None:
    """The loaded state continues to train as the original does."""
    for rank in runs(world):
        for layout, run in rank.items():
            if not layout.endswith("policy"):
                continue
            assert all(torch.equal(run["loaded"][name], tensor) for name, tensor in run["weights"].items()), layout
            original, reloaded = run["then"]
            assert original["grad_norm"] == pytest.approx(reloaded["grad_norm"], rel=1e-5), layout


@pytest.mark.parametrize("world", [1, 2, FOUR])
def test_changes_of_divided_experts_reach_the_engines_copy(runs: Any, world: int) -> None:
    copied = {layout: run for layout, run in runs(world)[0].items() if run.get("copied")}
    assert copied
    for layout, run in copied.items():
        tensors, differences = run["copied"]
        assert not differences, layout
        assert all(torch.equal(tensors[name], weight) for name, weight in run["weights"].items()), layout


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
@pytest.mark.parametrize("world", [2, FOUR])
def test_master_weights_are_the_same_in_each_layout(runs: Any, world: int, dtype: str) -> None:
    """Their noise, too."""
    expected = runs(1)[0][f"1 × 1 × 1 × 1, {dtype}"]["masters"]
    experts = {name for name in expected if ".experts." in name and name.endswith("proj")}
    assert experts
    assert not any(torch.equal(expected[name], expected[name].bfloat16().float()) for name in experts)
    for rank in runs(world):
        for layout in (layout for layout in rank if layout.endswith(dtype)):
            masters = rank[layout]["masters"]
            assert all(torch.equal(masters[name], weight) for name, weight in expected.items()), layout


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
def test_in_16_bits_it_is_the_same_but_for_rounding(runs: Any, dtype: str) -> None:
    """Rounding may route some tokens to another expert."""
    (expected,) = runs(1)[0][f"1 × 1 × 1 × 1, {dtype}"]["sums"]
    layout_names = [layout for layout in runs(2)[0] if layout.endswith(dtype)]
    assert {layout.rpartition(" × ")[2][0] for layout in layout_names} == {"1", "2"}
    for layout in layout_names:
        ranks = [rank[layout] for rank in runs(2)]
        summed = sum_by_key(
            first_per_data_rank([rank["sums"][0] for rank in ranks], [rank["data_rank"] for rank in ranks])
        )
        for name in ("loss", "grad_norm"):
            assert summed[name] == pytest.approx(expected[name], rel=0.02), (layout, name)
        assert ("gradient_scale" in summed) == (dtype == "torch.float16")
