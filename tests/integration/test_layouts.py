"""Any layout of one, two or four processes trains as plain torch in one process does, by the roles of a worker.

`Exact`, `.double()` and `reduced_as_float32` are all that makes them compute in float64: FSDP2 takes the dtype of the
parameters when they are first gathered, and AdamW when it first steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plain_updates import (
    BETAS,
    DECAY,
    FEATURES,
    LR,
    STEPS,
    TEMPERATURE,
    VALUE_CLIP,
    Exact,
    Feature,
    UpdateRecord,
    make_models,
    plain,
)
from test_model_sharded import free_port
from torch import Tensor
from transformers.utils import logging

from rlcli.cluster.dispatch import first_per_data_rank, sum_by_key
from rlcli.config.schema import RunConfig
from rlcli.data.messages import Coefficients
from rlcli.data.packer import plan_batches
from rlcli.data.sample_shard import ShardBuilder
from rlcli.data.train_rows import MinibatchCounts, SampleColumns, TrainRows
from rlcli.data.trajectories import Trajectory
from rlcli.model.decoder import gathered as gathered_weights
from rlcli.model.lora import is_adapter
from rlcli.model.parallel import fsdp_sharding
from rlcli.model.parallel.parallel_dims import ParallelDims
from rlcli.training.worker.critic_role import CriticRole
from rlcli.training.worker.fsdp_backend import FsdpBackend, FsdpLoader
from rlcli.training.worker.policy_role import PolicyRole
from rlcli.training.worker.train_batch import TrainBatch

pytestmark = pytest.mark.timeout(900)
CPU = torch.device("cpu")
TRAINED = ["policy", "adapter", "critic"]
QUANTITIES = ("loss", "norm", "gradients", "weights")


@dataclass(frozen=True)
class Case:
    """Work of a process group."""

    folder: Path
    """Folder of the models and references."""
    kind: str
    """Architecture of the models: dense or experts."""
    dtype: torch.dtype
    """Dtype of the computation."""
    features: tuple[str, ...]
    """Keys of FEATURES."""

    def exactly(self) -> Any:
        return Exact() if self.dtype == torch.float64 else nullcontext()


def layouts(kind: str, world: int) -> list[ParallelDims]:
    """All that divide `world` ranks; of a mixture of experts those that divide its four experts. One rank: alone."""
    if world == 1:
        return [ParallelDims.of(1, 1)]
    sizes = (1, 2, 4)
    return [
        ParallelDims.of(world, replicate, context, expert)
        for replicate in sizes
        for context in sizes
        for expert in ((1,) if kind == "dense" else (2, 4))
        if world % (replicate * context) == 0 and world // replicate % expert == 0
    ]


def name_of(dims: ParallelDims) -> str:
    parts = [f"{name} {size}" for name, size in vars(dims).items() if size > 1]
    return " × ".join(parts) or "one process"


def config_of(case: Case, feature: Feature) -> RunConfig:
    models = case.folder / case.kind
    return RunConfig.model_validate(
        {
            "model": {"path": str(models / "policy"), "gradient_checkpointing": feature.recomputed},
            "rollout": {"temperature": TEMPERATURE},
            "train": {"max_grad_norm": feature.max_norm, "betas": BETAS, "weight_decay": DECAY},
            "algorithm": {"kl_coef": feature.kl, "entropy_coef": feature.entropy},
            "lora": {"rank": feature.rank, "alpha": feature.alpha or 1.0},
            "critic": {"path": str(models / "critic"), "clip": VALUE_CLIP},
            "fault_tolerance": {"bad_grad_norm": None},
        }
    )


def batch_of(feature: Feature, dims: ParallelDims, rank: int) -> TrainBatch:
    """This rank's rows as a worker has them, planned for all data ranks."""
    rows, builder = feature.rows(), ShardBuilder()
    for row in rows:
        response = row.tokens[row.prompt :]
        builder.add(Trajectory.single(row.tokens[: row.prompt], response, row.engine.astype(np.float32)))
    groups = [number // feature.samples for number in range(len(rows))]
    plan = plan_batches(
        [row.prompt for row in rows],
        [row.drawn for row in rows],
        groups,
        minibatches=1,
        ranks=dims.data_size,
        tokens_per_microbatch=feature.budget,
        max_response_tokens=16,
        prompts=groups if feature.samples > 1 else None,
    )
    mini = plan.minibatches[0]
    work = MinibatchCounts(mini.tokens, mini.sequences, mini.groups, mini.max_length, mini.tokens)
    columns = SampleColumns(
        shard=np.zeros(len(rows), np.int64),
        row=np.arange(len(rows)),
        advantages=np.array([row.advantage for row in rows]),
    )
    with patch.object(ray, "get", lambda reference, timeout: reference):  # the shard lies here
        rank_bins = plan.of_rank(dims.data_rank(rank))
        batch = TrainBatch(rank_bins, TrainRows([work], columns, 0, [builder.build()]), CPU)
    batch.fill("returns", {number: row.returns for number, row in enumerate(rows)})
    return batch


class Training:
    """A role of the product in a layout, and the batch that it trains on. Collective."""

    def __init__(self, case: Case, feature: Feature, loader: FsdpLoader, rank: int) -> None:
        self.case, self.feature, self.dims, self.rank = case, feature, loader.mesh.dims, rank
        config = loader.config = config_of(case, feature)

        def load(kind: Any, path: str, **options: Any) -> FsdpBackend:
            backend = loader(kind, path, **options)
            if case.dtype == torch.float64:
                in_float64(backend.model)
            return backend

        torch.manual_seed(0)
        with patch.object(fsdp_sharding, "WHOLE_BYTES", 0):  # layer by layer, as large models are
            self.role: Any = PolicyRole(config, CPU, load) if feature.kind == "policy" else CriticRole(config, load)
        self.backend: FsdpBackend = self.role.policy if feature.kind == "policy" else self.role.model
        self.backend.optimizer.register_step_pre_hook(self._keep)
        self.gradients: list[dict[str, Tensor]] = []
        self.initial = self.weights()
        with case.exactly():
            self.batch = batch_of(feature, self.dims, rank)

    def prepare(self) -> None:
        """Infer values, or old and reference log-probs, of the batch before its first update."""
        with self.case.exactly():
            if self.feature.kind == "critic":
                self.role.infer(self.batch)
                return
            self.role.compute_old_log_probs(self.batch)
            if self.role.algorithm.needs_reference:
                self.role.compute_reference_log_probs(self.batch)

    def update(self) -> tuple[float, float]:
        """Loss and gradient norm."""
        with self.case.exactly():
            if self.feature.kind == "critic":
                rank_sums = self.role.update(self.batch, 0, LR)
            else:
                rank_sums = self.role.update(self.batch, 0, Coefficients(LR, self.feature.kl, self.feature.entropy))
        sums_of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sums_of_ranks, rank_sums)
        data_ranks = [self.dims.data_rank(rank) for rank in range(len(sums_of_ranks))]
        sums = sum_by_key(first_per_data_rank(sums_of_ranks, data_ranks))
        assert "bad" not in sums, sums
        terms = (
            (sums["loss"],)
            if self.feature.kind == "critic"
            else (
                sums["policy_loss"],
                self.feature.kl * sums.get("kl", 0.0),
                -self.feature.entropy * sums["entropy"],
            )
        )
        return sum(terms) / sums["tokens"], sums["grad_norm"]

    def weights(self) -> dict[str, Tensor]:
        """The trained ones, whole, in float64."""
        return gathered((name, weight) for name, weight in self._trained())

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, weight) for name, weight in self.backend.model.lm.named_parameters() if weight.requires_grad)

    def _keep(self, *_: object) -> None:
        self.gradients.append(
            gathered((name, weight.grad) for name, weight in self._trained() if weight.grad is not None)
        )


def in_float64(model: Any) -> None:
    """In place. Layers enter `Exact` by themselves too: the backward pass, which recomputes them, does not keep it."""
    model.double()
    for layer in model.lm.base_model.layers:
        layer.forward = partial(exactly, layer.forward)


def reduced_as_float32() -> Any:
    """Within it FSDP2 averages gradients in float64 as it does in float32. By itself it takes every other dtype for one
    that overflows, divides before and after, and in groups of one rank (experts that all ranks divide) once too often.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    original = collectives._get_gradient_divide_factors

    def factors(scatter: Any, reduce: Any, dtype: torch.dtype, *rest: Any) -> Any:
        return original(scatter, reduce, torch.float32 if dtype == torch.float64 else dtype, *rest)

    return patch.object(collectives, "_get_gradient_divide_factors", factors)


def exactly(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with Exact():
        return forward(*args, **kwargs)


def gathered(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in gathered_weights(tensors, torch.float64)}


def largest_difference(actual: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest ‖actual − wanted‖ / ‖wanted‖ of a tensor; a tensor of zeros must be one."""
    assert actual.keys() == wanted.keys(), actual.keys() ^ wanted.keys()
    return max(_relative(actual[name], wanted[name]) for name in wanted)


def _relative(actual: Tensor, wanted: Tensor) -> float:
    off, size = float((actual - wanted).norm()), float(wanted.norm())
    return off / size if size else off


def trains(case: Case, name: str, loader: FsdpLoader, rank: int) -> dict[str, Any]:
    """Largest relative differences of a feature in a layout from the reference, which one process computes."""
    training = Training(case, FEATURES[name], loader, rank)
    reference = case.folder / f"{case.kind}, {name}.pt"
    if dist.get_world_size() == 1:
        adapter = {name: weight for name, weight in training.initial.items() if is_adapter(name)}
        torch.save(plain(case.folder / case.kind, FEATURES[name], adapter), reference)
    wanted: UpdateRecord = torch.load(reference, weights_only=False)
    training.prepare()
    losses, norms = zip(*(training.update() for _ in range(STEPS)), strict=True)
    micros = training.batch.minibatches[0]
    gradients = [largest_difference(*pair) for pair in zip(training.gradients, wanted.gradients, strict=True)]
    return {
        "loss": max(abs(loss / expected - 1) for loss, expected in zip(losses, wanted.losses, strict=True)),
        "norm": max(abs(norm / expected - 1) for norm, expected in zip(norms, wanted.norms, strict=True)),
        "gradients": max(gradients),
        "weights": largest_difference(training.weights(), wanted.weights),
        "micro-batches": len(micros),
        "idle": any(micro.empty for micro in micros),
    }


def act(rank: int, world: int, port: int, case: Case, results: str) -> None:
    """All layouts of `world` processes; `results`-`rank`.json gets the differences of each run."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    with reduced_as_float32():
        loaders = [FsdpLoader(RunConfig(), torch.float32, CPU, dims) for dims in layouts(case.kind, world)]
        rows = [
            {"kind": case.kind, "layout": name_of(loader.mesh.dims), "world": world, "feature": name}
            | trains(case, name, loader, rank)
            for loader in loaders
            for name in case.features
        ]
    Path(f"{results}-{rank}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def differences(
    folder: Path, kinds: Sequence[str], world: int, features: Sequence[str], dtype: torch.dtype
) -> list[dict[str, Any]]:
    """What `trains` returns, for each rank of each layout of one process and of `world`."""
    # Each group forks from one process that has imported, which takes longer than most runs.
    mp.get_context("forkserver").set_forkserver_preload([__name__])
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        make_models(folder / kind, kind == "experts")
        for size in (1, world):
            results = str(folder / f"{kind}-{size}")
            case = Case(folder, kind, dtype, tuple(features))
            mp.start_processes(act, (size, free_port(), case, results), nprocs=size, start_method="forkserver")
            rows += [row for rank in range(size) for row in json.loads(Path(f"{results}-{rank}.json").read_text())]
    return rows


def layouts_of(rows: list[dict[str, Any]], world: int) -> set[tuple[str, str]]:
    return {(row["kind"], row["layout"]) for row in rows if row["world"] == world}


def most(rows: list[dict[str, Any]]) -> float:
    return max(row[name] for row in rows for name in QUANTITIES)


@pytest.mark.exhaustive  # the same in float32 runs in CI
def test_two_processes_train_as_one_in_float64(tmp_path: Path) -> None:
    """All layouts, of which some leave a rank idle."""
    rows = differences(tmp_path, ["dense"], 2, ["adapter", "critic"], torch.float64)
    rows += differences(tmp_path, ["experts"], 2, ["policy"], torch.float64)
    dense = {("dense", name) for name in ("shard 2", "context 2", "replicate 2")}
    experts = {("experts", name) for name in ("shard 2 × expert 2", "context 2 × expert 2")}
    assert layouts_of(rows, 2) == dense | experts
    assert all(row["micro-batches"] > 1 for row in rows)
    assert {row["layout"] for row in rows if row["idle"]} >= {"shard 2", "replicate 2", "shard 2 × expert 2"}
    assert most(rows) <= 1e-10, max(rows, key=lambda row: most([row]))


@pytest.mark.long
def test_in_float32_they_differ_by_rounding_alone(tmp_path: Path) -> None:
    rows = differences(tmp_path, ["dense"], 2, TRAINED, torch.float32)
    assert 1e-8 < most(rows) <= 1e-3
    assert max(row["loss"] for row in rows) <= 1e-5


@pytest.mark.exhaustive  # two processes show each kind of layout
def test_four_processes_train_as_one_in_float64(tmp_path: Path) -> None:
    rows = differences(tmp_path, ["dense", "experts"], 4, ["idle ranks", *TRAINED], torch.float64)
    assert {len([one for one in layouts_of(rows, 4) if one[0] == kind]) for kind in ("dense", "experts")} == {6, 8}
    assert most(rows) <= 1e-10, max(rows, key=lambda row: most([row]))
