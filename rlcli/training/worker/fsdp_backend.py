"""The training backend on FSDP2: AdamW or Muon over a model that is sharded, and possibly replicated, over all ranks,
of which some may divide the tokens of each micro-batch among themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, cast, overload

from rlcli.algorithms.ranks import Ranks
from rlcli.cluster.watchdog import progress
from rlcli.config.schema import RunConfig
from rlcli.model.parallel.parallel_dims import ParallelDims
from rlcli.training.worker.plan_integrity import CopyCheck, ReductionCheck, StepCheck
from rlcli.training.worker.train_batch import MicroBatch

if TYPE_CHECKING:
    import torch
    from jaxtyping import Bool, Float
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from rlcli.model.logprobs import Likeliest
    from rlcli.model.lora import LoraSpec
    from rlcli.model.packed import PackedBatch
    from rlcli.model.parallel.context_parallel import ContextGroup
    from rlcli.model.parallel.offload import Offload
    from rlcli.model.parallel.weight_delta import LastSent
    from rlcli.model.policy import PolicyModel, TokenOutputs
    from rlcli.model.value_model import ValueModel, ValueOutputs


GRADIENT_SCALE = "gradient_scale"
"""In a checkpoint, of a model that computes in float16."""


@dataclass(frozen=True)
class RankMesh:
    """This rank's position in the process groups that models are divided over."""

    dims: ParallelDims
    """Sizes of all dimensions."""
    mesh: DeviceMesh
    """Over which weights are sharded and replicated."""
    experts: DeviceMesh | None
    """Over which the weights of experts are sharded, if ranks divide the experts."""
    context: ContextGroup | None
    """Ranks that divide the tokens of each pack, if any do."""
    ranks: Ranks
    """Sums and concatenations over the data ranks."""

    @classmethod
    def of(cls, dims: ParallelDims, device: torch.device) -> RankMesh:
        """Create the groups. Collective."""
        from rlcli.model.parallel.context_parallel import ContextGroup

        groups = dims.groups(device.type)
        data, context = groups if groups is not None else (None, None)
        return cls(
            dims=dims,
            mesh=dims.mesh(device.type),
            experts=dims.experts_mesh(device.type),
            context=None if context is None else ContextGroup(context),
            ranks=_collectives(data),
        )


class FsdpLoader:
    """Implements `Loader`: loads models that are divided as `dims` says. dtype: of computation. Collective."""

    def __init__(self, config: RunConfig, dtype: torch.dtype, device: torch.device, dims: ParallelDims) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.mesh = RankMesh.of(dims, device)

    @overload
    def __call__(
        self,
        kind: Literal["policy"],
        path: str,
        *,
        lora: LoraSpec | None = None,
        trained: bool = True,
        replays: bool = False,
    ) -> FsdpBackend[TokenOutputs]: ...
    @overload
    def __call__(self, kind: Literal["value"], path: str) -> FsdpBackend[ValueOutputs]: ...
    def __call__(
        self,
        kind: Literal["policy", "value"],
        path: str,
        *,
        lora: LoraSpec | None = None,
        trained: bool = True,
        replays: bool = False,
    ) -> FsdpBackend[TokenOutputs] | FsdpBackend[ValueOutputs]:
        from rlcli.model.io.loading import load_policy, load_value
        from rlcli.model.mixture.routing import Replay

        config, mesh = self.config.model, self.mesh
        if kind == "value":
            value_model = load_value(
                path,
                dtype=self.dtype,
                device=self.device,
                mesh=mesh.mesh,
                experts=mesh.experts,
                context=mesh.context,
                gradient_checkpointing=config.gradient_checkpointing,
                compiled=config.compile,
            )
            critic: FsdpBackend[ValueOutputs] = FsdpBackend(value_model, self.config, mesh)
            return critic
        policy = load_policy(
            path,
            dtype=self.dtype,
            device=self.device,
            mesh=mesh.mesh,
            experts=mesh.experts,
            context=mesh.context,
            lora=lora,
            frozen=config.freeze,
            gradient_checkpointing=config.gradient_checkpointing,
            compiled=config.compile,
            trainable=trained,
        )
        policy.float_head = config.head_dtype == "float32"
        policy.replay = Replay(policy) if replays else None
        backend: FsdpBackend[TokenOutputs] = FsdpBackend(policy, self.config, mesh, trained)
        return backend


Outputs = TypeVar("Outputs", bound="TokenOutputs | ValueOutputs")


class FsdpBackend(Generic[Outputs]):
    """Implements `PolicyBackend` or `ValueBackend`, by its model, whose outputs are `Outputs`. trained=False: no
    optimizer."""

    def __init__(
        self, model: PolicyModel | ValueModel, config: RunConfig, mesh: RankMesh, trained: bool = True
    ) -> None:
        import torch

        from rlcli.model.mixture.routing import Load
        from rlcli.model.optim import GradientScale, MuonSettings, build_optimizer
        from rlcli.model.parallel.fsdp_sharding import casts_once

        train = config.train
        self.model = model
        self.max_grad_norm = train.max_grad_norm
        self.bad_grad_norm = config.fault_tolerance.bad_grad_norm or math.inf
        self.data_ranks = mesh.dims.data_size
        self.replicated = mesh.dims.replicate > 1
        self.ranks = mesh.ranks
        self._outputs: Outputs | None = None
        """Of the micro-batch that waits for its backward pass."""
        self._sums: dict[str, Tensor] = {}
        self._loss_finite: bool | Tensor = True
        self._grad_norm: float | None = None
        if trained:
            muon = MuonSettings(train.muon_momentum, train.muon_step_size) if train.optimizer == "muon" else None
            self.optimizer = build_optimizer(model, 0.0, train.betas, train.weight_decay, muon)
            self.reduction_check = ReductionCheck(model, mesh.mesh.size())
            self.step_check = StepCheck(model)
            self.copy_check = CopyCheck(model, mesh.mesh)
            self.expert_load = Load(model)
            self.scale = GradientScale() if model.dtype == torch.float16 else None
            self.casts_once = casts_once(model, mesh.dims, mesh.mesh.device_type)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def adapter_scale(self) -> float:
        return self._policy.adapter_scale

    def log_probs(self, batch: PackedBatch, temperature: float) -> Float[Tensor, " R"]:
        import torch

        progress()
        with torch.no_grad():
            outputs: TokenOutputs = self.model(batch, temperature=temperature, want_entropy=False)
        return outputs.log_probs

    def likeliest(self, batch: PackedBatch, temperature: float, k: int, below: int) -> Likeliest:
        import torch

        progress()
        with torch.no_grad():
            outputs: Likeliest = self.model(batch, temperature=temperature, likeliest=(k, below))
        return outputs

    def values(self, batch: PackedBatch) -> Float[Tensor, " R"]:
        import torch

        progress()
        with torch.no_grad():
            outputs: ValueOutputs = self.model(batch)
        return outputs.values

    def adapter_disabled(self) -> AbstractContextManager[None]:
        return self._policy.adapter_disabled()

    def rounded_again(self, unit: float, seed: int) -> AbstractContextManager[None]:
        from rlcli.model.rounding import rounded_again

        return rounded_again(self.model, unit, seed)

    def forward(self, micros: Sequence[MicroBatch], **options: float) -> Iterator[tuple[MicroBatch, Outputs]]:
        from rlcli.model.optim import clip_grad_norm
        from rlcli.model.parallel.fsdp_sharding import end_cast, keep_cast

        self._grad_norm = None
        if not micros:
            return  # No sample of this minibatch has a gradient, on any rank.
        scale = self.scale.state if self.scale is not None else None
        while True:
            self._sums, self._loss_finite = {}, True
            for micro in micros:
                progress()
                last = micro is micros[-1]
                if self.replicated:  # copies sum their gradients once, with those of the last micro-batch
                    self._sharded.set_requires_all_reduce(last)
                if self.casts_once:
                    keep_cast(self._sharded, last=last)
                outputs: Outputs = self._scaled(self.model(micro.packed, **options))
                # An empty pack still takes part in the collectives of the backward pass, with a gradient of zero.
                if micro.empty:
                    (outputs[0].sum() * 0.0).backward()
                    continue
                self._outputs = outputs
                yield micro, outputs
                assert self._outputs is None, "each micro-batch needs a backward pass"
            if self.casts_once:
                end_cast(self._sharded)
            self.reduction_check.check()
            norm = clip_grad_norm(self.model, self.max_grad_norm, 1.0 if self.scale is None else self.scale.value)
            if self.scale is None or math.isfinite(norm):
                break
            if not self._on_all_ranks(self._loss_finite) or not self.scale.lower():
                assert scale is not None
                self.scale.state = scale  # the loss itself is not finite: restore the scale
                break
            # Only gradients have overflowed: the same passes again, with a lower scale.
            self.optimizer.zero_grad(set_to_none=True)
            self._expert_metrics()
        self._grad_norm = norm

    def backward(self, loss: Float[Tensor, ""], sums: Mapping[str, Tensor]) -> None:
        assert self._outputs is not None, "no micro-batch waits for its backward pass"
        output: Tensor = self._outputs[0]
        self._outputs = None
        finite = _finite(loss, output)
        self._loss_finite = self._loss_finite & finite
        # FSDP averages gradients over ranks; the loss is a sum over data ranks.
        (_poisoned(loss, output, finite) * self.data_ranks).backward()
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def step(self, lr: float) -> dict[str, float]:
        import torch

        norm, sums = self._grad_norm, self._sums
        if norm is None:
            return {}
        bad = not math.isfinite(norm) or norm > self.bad_grad_norm  # the same on all ranks
        if not bad:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.step_check.before(lr)
            self.optimizer.step()
            if self.scale is not None:
                self.scale.lasted()
            self.copy_check.check()
            sums |= self.step_check.after()
        self.optimizer.zero_grad(set_to_none=True)
        expert_metrics = self._expert_metrics()
        if bad:
            return {"bad": 1.0 / self.data_ranks, "grad_norm": norm / self.data_ranks}
        values = torch.stack(list(sums.values())).tolist() if sums else []
        same_on_all = {"grad_norm": norm, **expert_metrics}
        if self.scale is not None:
            same_on_all["gradient_scale"] = self.scale.value
        return dict(zip(sums, values, strict=True)) | {name: x / self.data_ranks for name, x in same_on_all.items()}

    def _scaled(self, outputs: Outputs) -> Outputs:
        """Outputs whose gradients are scaled up where they enter the network, if it computes in float16."""
        from rlcli.model.optim import gradient_scaled

        if self.scale is None:
            return outputs
        parts = [None if part is None else gradient_scaled(part, self.scale.value) for part in outputs]
        return cast("Outputs", getattr(outputs, "_make", tuple)(parts))  # a named tuple's `_make` keeps its type

    def _on_all_ranks(self, finite: bool | Tensor) -> bool:
        """Logical and over all ranks. Collective."""
        import torch
        import torch.distributed as dist

        all_finite = torch.as_tensor(finite, dtype=torch.int32, device=next(self.model.parameters()).device)
        dist.all_reduce(all_finite, dist.ReduceOp.MIN)
        return bool(all_finite)

    def _expert_metrics(self) -> dict[str, float]:
        """Distribution of the update's tokens over the experts, if there are any: the same on all ranks."""
        import torch.distributed as dist

        from rlcli.model.mixture.routing import load_metrics, replay_metrics

        counts = self.expert_load.take()
        if counts is None:
            return {}
        dist.all_reduce(counts)
        replayed = self.model.replay.take() if self.model.replay is not None else None
        if replayed is None:
            return load_metrics(counts)
        dist.all_reduce(replayed)
        return load_metrics(counts) | replay_metrics(replayed)

    @property
    def _policy(self) -> PolicyModel:
        from rlcli.model.policy import PolicyModel

        assert isinstance(self.model, PolicyModel), "a value model has no adapter"
        return self.model

    @property
    def _sharded(self) -> FSDPModule:
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(self.model, FSDPModule), "the model is sharded"
        return self.model

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.model.stream_weights()

    def stream_changes(self, last: LastSent, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        from rlcli.model.tensor_names import named_weights

        return last.changes(named_weights(self.model.lm), self.dtype, bucket_bytes)

    def stream_base(self) -> Iterator[tuple[str, Tensor]]:
        return self._policy.stream_base()

    def save_adapter(self, folder: Path) -> dict[str, Tensor]:
        return self._policy.save_adapter(folder)

    def state(self, name: str) -> dict[str, Tensor]:
        from rlcli.model.io.model_state import trained_state

        scale = {} if self.scale is None else {f"{name}.{GRADIENT_SCALE}": self.scale.state}
        return trained_state({name: (self.model, self.optimizer)}) | scale

    def load_state(self, folder: Path, name: str) -> None:
        from rlcli.model.io.model_state import load_state

        if self.scale is not None:
            self.scale.state = self.scale.state.clone()  # the old one may be in a checkpoint that is being written
        extra = {} if self.scale is None else {f"{name}.{GRADIENT_SCALE}": self.scale.state}
        load_state({name: (self.model, self.optimizer)}, folder, progress, extra)

    def register(self, offload: Offload, name: str) -> None:
        offload.add(name, self.model, getattr(self, "optimizer", None))


def _collectives(group: ProcessGroup | None) -> Ranks:
    """Sums and concatenations over `group`, or over all ranks."""
    import torch
    import torch.distributed as dist

    def add(tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    def gather(tensor: Tensor) -> Tensor:
        parts: list[Tensor | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, tensor.cpu(), group=group)
        return torch.cat([part for part in parts if part is not None]).to(tensor.device)

    return Ranks(add, gather)


def _finite(loss: Float[Tensor, ""], output: Float[Tensor, " R"]) -> Bool[Tensor, ""]:
    import torch

    return torch.isfinite(loss.detach()) & torch.isfinite(output.detach()).all()


def _poisoned(loss: Float[Tensor, ""], output: Float[Tensor, " R"], finite: Bool[Tensor, ""]) -> Float[Tensor, ""]:
    """The loss unchanged or, if it or the output is not `finite`, one whose gradient is NaN: every rank sees that in
    the norm without further communication. (A clipped ratio or a mask can hide a NaN from the gradient.)"""
    import torch

    # Through `output`, which the loss always depends on: 0 · NaN is NaN, and adding 0 changes no bit of a finite loss.
    return loss + (output * torch.where(finite, 0.0, math.nan)).sum()
