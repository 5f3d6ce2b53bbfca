"""Updates on two real ranks, of which one alone goes wrong: neither steps, and both continue alike."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlcli.config.schema import RunConfig
from rlcli.errors import RunFailed
from rlcli.model.io.model_state import save_state
from rlcli.model.optim import GradientScale
from rlcli.model.parallel.parallel_dims import ParallelDims
from rlcli.training.worker.fsdp_backend import FsdpBackend, RankMesh, _finite, _poisoned

BOUND = 50.0
Loss = Callable[[torch.Tensor], torch.Tensor]

LOSSES: dict[str, Loss] = {
    "sound": lambda output: output.square().mean(),
    "loss is NaN, gradient is not": lambda output: output.square().mean() + math.nan,
    "loss is infinite, gradient is not": lambda output: output.square().mean() + math.inf,
    "gradient is NaN": lambda output: (output - output.detach()).abs().sqrt().sum(),
    "exploding": lambda output: 1e6 * output.square().mean(),
}
"""Losses of rank 1; rank 0 always computes a sound one."""


class Model(torch.nn.Sequential):
    """Gives a tuple, as policies and value models do."""

    dtype = torch.float32

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor]:
        return (super().forward(inputs),)


def update_of(backend: FsdpBackend, micros: list[Any], loss: Callable[[Any, Any], Any]) -> dict[str, float]:
    """One optimizer step on `micros`. loss: of a micro-batch and its outputs, and what to report."""
    for micro, outputs in backend.forward(micros):
        backend.backward(*loss(micro, outputs))
    return backend.step(0.1)


def child(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model: Any = Model(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    mesh = RankMesh.of(ParallelDims.of(2, replicate=1), torch.device("cpu"))
    fully_shard(model, mesh=mesh.mesh)
    config = RunConfig.model_validate({"fault_tolerance": {"bad_grad_norm": BOUND}, "train": {"max_grad_norm": 1.0}})
    backend = FsdpBackend(model, config, mesh)
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))

    def weights() -> torch.Tensor:
        return torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])

    def update(name: str, empty: bool = False) -> dict[str, Any]:
        weights_before = weights()

        def loss(_: Any, outputs: tuple[torch.Tensor]) -> Any:
            rank_loss = LOSSES[name if rank else "sound"](outputs[0])
            return rank_loss, {"loss": rank_loss.detach().double()}

        micro: Any = SimpleNamespace(empty=empty, packed=inputs)
        sums = update_of(backend, [micro], loss)
        gradients = [parameter.grad is not None for parameter in model.parameters()]
        return {"sums": sums, "moved": not torch.equal(weights_before, weights()), "gradients": any(gradients)}

    reports = {name: update(name) for name in LOSSES} | {"sound again": update("sound")}
    reports["empty rank"] = update("sound", empty=bool(rank))
    reports["unreduced"] = {"error": unreduced(update)}
    reports["copies"] = copies(rank)
    reports["half"] = half(rank, Path(folder))
    torch.save(reports | {"weights": weights()}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def copies(rank: int) -> dict[str, str]:
    """Errors of updates while each rank has a copy of the model: with equal copies, and after one copy has changed."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = Model(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    mesh = RankMesh.of(ParallelDims.of(2, replicate=2), torch.device("cpu"))
    fully_shard(model, mesh=mesh.mesh)
    backend, errors = FsdpBackend(model, RunConfig(), mesh), {}
    micros: Any = [SimpleNamespace(empty=False, packed=torch.full((3, 4), rank + shift)) for shift in (0.5, 1.5)]
    for name in ("alike", "changed"):
        if name == "changed" and rank:
            model[1].weight.data.to_local()[0, 0] += 1e-3
        try:
            update_of(backend, micros, lambda _, outputs: (outputs[0].square().mean(), {}))
            errors[name] = ""
        except RunFailed as error:
            errors[name] = error.message
    return errors


HALF: dict[str, tuple[float, Loss]] = {
    "tiny": (1.0, lambda output: 1e-8 * output.square().sum()),
    "overflowing": (1.0, lambda output: 3.0 * output.square().sum()),
    "too large": (1.0, lambda output: 1e9 * output.square().sum()),
    "NaN": (math.nan, LOSSES["sound"]),
}
"""Of a model in float16: a factor of rank 1's loss, and the loss."""


def half(rank: int, folder: Path) -> dict[str, Any]:
    """Update of a model in float16: its report, the gradient scale after it and in a backend that has loaded its state,
    and how far it moves the weights; and the update of the same model in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    reports: dict[str, Any] = {}
    for name, (factor, loss) in HALF.items():
        for dtype in (torch.float32, torch.float16):
            torch.manual_seed(0)
            model: Any = Model(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
            model.dtype = dtype
            mesh = RankMesh.of(ParallelDims.of(2, replicate=1), torch.device("cpu"))
            precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
            fully_shard(model, mesh=mesh.mesh, mp_policy=precision)
            backend = FsdpBackend(model, RunConfig.model_validate({"train": {"max_grad_norm": 1e-3}}), mesh)
            flat_before = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
            inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
            scaled_loss = partial(
                lambda factor, loss, _, outputs: (factor * loss(outputs[0]), {}), factor if rank else 1.0, loss
            )
            micro: Any = SimpleNamespace(empty=False, packed=inputs)
            sums = update_of(backend, [micro], scaled_loss)
            flat_after = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
            scale = loaded = None
            if backend.scale is not None:
                scale, state = backend.scale.value, backend.scale.state
                save_state(backend.state("policy"), {}, folder / name, dist.group.WORLD)
                backend.scale = GradientScale()
                backend.load_state(folder / name, "policy")
                loaded = torch.equal(backend.scale.state, state)
            reports[f"{name}, {str(dtype).removeprefix('torch.')}"] = {
                "sums": sums,
                "moved": flat_after - flat_before,
                "scale": scale,
                "loaded": loaded,
            }
    return reports


def unreduced(update: Callable[[str], object]) -> str:
    """The error of an update in which each rank keeps its own gradients."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    def keep(_: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **__: Any) -> None:
        output_tensor.copy_(input_tensor.chunk(dist.get_world_size())[dist.get_rank()])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultReduceScatter, "__call__", keep)
        with pytest.raises(RunFailed) as failed:
            update("sound")
    return failed.value.message


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fsdp")
    mp.spawn(child, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "sound"])
def test_no_rank_steps_where_one_of_them_has_a_bad_gradient(ranks: list[dict[str, Any]], name: str) -> None:
    for report in (rank[name] for rank in ranks):
        assert not report["moved"]
        assert not report["gradients"], "the bad gradient would be part of the next one"
        assert report["sums"]["bad"] == 0.5
        assert set(report["sums"]) == {"bad", "grad_norm"}
    norm = sum(rank[name]["sums"]["grad_norm"] for rank in ranks)
    assert norm > BOUND if name == "exploding" else not math.isfinite(norm)


@pytest.mark.parametrize(("name", "lowered"), [("tiny", False), ("overflowing", True)])
def test_gradients_in_float16_are_scaled_so_that_none_is_lost(
    ranks: list[dict[str, Any]], name: str, lowered: bool
) -> None:
    """AdamW's first step is the sign of a gradient: lost ones would not move their weights."""
    for rank in ranks:
        half, full = (rank["half"][f"{name}, {dtype}"] for dtype in ("float16", "float32"))
        assert half["sums"]["grad_norm"] == pytest.approx(full["sums"]["grad_norm"], rel=2e-3)
        torch.testing.assert_close(half["moved"], full["moved"], rtol=0.02, atol=1e-4)
        assert (half["scale"] < GradientScale.FIRST) == lowered
        assert full["scale"] is None
        assert half["loaded"], "a run that resumes has the same scale"


@pytest.mark.parametrize("name", ["too large", "NaN"])
def test_what_no_scale_helps_against_is_a_bad_gradient(ranks: list[dict[str, Any]], name: str) -> None:
    for report in (rank["half"][f"{name}, float16"] for rank in ranks):
        assert report["sums"]["bad"] == 0.5
        assert not report["moved"].any()
        assert report["scale"] == GradientScale.FIRST, "it is not to blame"


def test_the_scale_rises_again() -> None:
    scale = GradientScale()
    assert scale.lower()
    for _ in range(GradientScale.LASTS - 1):
        scale.lasted()
    assert scale.value == GradientScale.FIRST / 2
    scale.lasted()
    assert scale.value == GradientScale.FIRST


@pytest.mark.parametrize("name", ["sound", "sound again", "empty rank"])
def test_sound_updates_before_and_after_it_step(ranks: list[dict[str, Any]], name: str) -> None:
    for rank, report in enumerate(results[name] for results in ranks):
        assert report["moved"]
        assert "bad" not in report["sums"]
        assert ("loss" in report["sums"]) == (name != "empty rank" or rank == 0)
        assert math.isfinite(report["sums"].get("loss", 0.0))
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    assert ranks[0]["weights"].isfinite().all()


def test_gradients_that_are_not_reduced_stop_the_run(ranks: list[dict[str, Any]]) -> None:
    for report in ranks:
        message = report["unreduced"]["error"]
        assert re.match(r"gradients are not summed over the 2 workers: that of \S+weight is ", message)


def test_a_non_finite_number_hidden_by_a_mask_is_found() -> None:
    weights = torch.randn(64, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def gradient(hidden: float, spoil: bool) -> torch.Tensor:
        output = weights * torch.linspace(-1, 1, 64)
        output = torch.cat([output, torch.full((1,), hidden)])
        term = output[:-1].exp().clamp(0.5, 1.5).sum()
        weights.grad = None
        (_poisoned(term, output, _finite(term, output)) if spoil else term).backward()
        assert weights.grad is not None
        return weights.grad

    assert torch.equal(gradient(0.0, spoil=True), gradient(0.0, spoil=False))
    for hidden in (math.nan, -math.inf):
        assert gradient(hidden, spoil=False).isfinite().all()
        assert gradient(hidden, spoil=True).isnan().any()
