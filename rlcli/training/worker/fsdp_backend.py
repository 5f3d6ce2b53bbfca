"""The training backend on FSDP2: AdamW or Muon over a model that is sharded, and possibly replicated, over all ranks,
of which some may divide the tokens of each micro-batch among themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlcli.algorithms.ranks import Ranks
from rlcli.cluster.watchdog import progress
from rlcli.config.schema import RunConfig
from rlcli.model.parallel.parallel_dims import ParallelDims
from rlcli.training.worker.backend import MicroLoss
from rlcli.training.worker.plan_integrity import CopyCheck, ReductionCheck, StepCheck
from rlcli.training.worker.train_batch import MicroBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from rlcli.model.logprobs import Likeliest
    from rlcli.model.lora import LoraSpec
    from rlcli.model.packed_batch import PackedBatch
    from rlcli.model.parallel.context_parallel import ContextGroup
    from rlcli.model.parallel.offload import Offload
    from rlcli.model.parallel.weight_delta import LastSent
    from rlcli.model.policy import PolicyModel


SCALE = "gradient_scale"
"""In a checkpoint, of a model that computes in float16."""


@dataclass(frozen=True)
class Place:
    """This rank's place among others. dims: of all. mesh, experts: of the weights, and of those of experts
    that are divided. context: the ranks that divide the tokens of
    each pack, if any do. ranks: sums and concatenations over the data ranks."""

    dims: ParallelDims
    mesh: DeviceMesh
    experts: DeviceMesh | None
    context: ContextGroup | None
    ranks: Ranks

    @classmethod
    def of(cls, dims: ParallelDims, device: torch.device) -> Place:
        """Collective."""
        from rlcli.model.parallel.context_parallel import ContextGroup

        groups = dims.groups(device.type)
        data, context = groups if groups is not None else (None, None)
        meshes = dims.mesh(device.type), dims.experts_mesh(device.type)
        return cls(dims, *meshes, None if context is None else ContextGroup(context), _ranks(data))


class FsdpLoader:
    """Loads models that are divided as `dims` says. dtype: of computation. Collective."""

    def __init__(self, config: RunConfig, dtype: torch.dtype, device: torch.device, dims: ParallelDims) -> None:
        self.config, self.place = config, Place.of(dims, device)
        place = self.place
        self.how = {"dtype": dtype, "device": device, "mesh": place.mesh, "context": place.context}
        self.how["experts"] = place.experts

    def __call__(
        self,
        kind: Literal["policy", "value"],
        path: str,
        *,
        lora: LoraSpec | None = None,
        trained: bool = True,
        replays: bool = False,
    ) -> FsdpBackend:
        from rlcli.model.io import loading
        from rlcli.model.mixture.routing import Replay

        config = self.config.model
        how = {**self.how, "compiled": config.compile, "gradient_checkpointing": config.gradient_checkpointing}
        if kind == "value":
            return FsdpBackend(loading.load_value(path, **how), self.config, self.place)
        model = loading.load_policy(path, lora=lora, frozen=config.freeze, trainable=trained, **how)
        model.float_head = config.head_dtype == "float32"
        model.replay = Replay(model) if replays else None
        return FsdpBackend(model, self.config, self.place, trained)


class FsdpBackend:
    """Implements `TrainingBackend` for `model`, a policy or value model. trained=False: no optimizer."""

    def __init__(self, model: Any, config: RunConfig, place: Place, trained: bool = True) -> None:
        import torch

        from rlcli.model.mixture.routing import Load
        from rlcli.model.optim import GradientScale, MuonSettings, build_optimizer
        from rlcli.model.parallel.fsdp_sharding import casts_once

        train = config.train
        self.model: PolicyModel = model  # or a value model, with the methods that both have
        self.max_grad_norm = train.max_grad_norm
        self.bad_grad_norm = config.fault_tolerance.bad_grad_norm or math.inf
        self.data_ranks = place.dims.data_size
        self.replicated = place.dims.replicate > 1
        self.ranks = place.ranks
        if trained:
            muon = MuonSettings(train.muon_momentum, train.muon_step_size) if train.optimizer == "muon" else None
            self.optimizer = build_optimizer(model, 0.0, train.betas, train.weight_decay, muon)
            self.reduction, self.stepped = ReductionCheck(model, place.mesh.size()), StepCheck(model)
            self.copies = CopyCheck(model, place.mesh)
            self.expert_load = Load(model)
            self.scale = GradientScale() if model.dtype == torch.float16 else None
            self.casts_once = casts_once(model, place.dims, place.mesh.device_type)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def adapter_scale(self) -> float:
        return self.model.adapter_scale

    def log_probs(self, batch: PackedBatch, temperature: float) -> Tensor:
        import torch

        progress()
        with torch.no_grad():
            log_probs: Tensor = self.model(batch, temperature=temperature, want_entropy=False).log_probs
        return log_probs

    def likeliest(self, batch: PackedBatch, temperature: float, k: int, below: int) -> Likeliest:
        import torch

        progress()
        with torch.no_grad():
            found: Likeliest = self.model(batch, temperature=temperature, likeliest=(k, below))
        return found

    def values(self, batch: PackedBatch) -> Tensor:
        import torch

        progress()
        with torch.no_grad():
            values: Tensor = self.model(batch).values
        return values

    def adapter_disabled(self) -> AbstractContextManager[None]:
        return self.model.adapter_disabled()

    def rounded_again(self, unit: float, seed: int) -> AbstractContextManager[None]:
        from rlcli.model.rounding import rounded_again

        return rounded_again(self.model, unit, seed)

    def update(self, micros: Sequence[MicroBatch], loss: MicroLoss, lr: float, **forward: Any) -> dict[str, float]:
        if not micros:
            return {}  # No sample of this minibatch has a gradient, on any rank.
        from rlcli.model.optim import clip_grad_norm

        scale = self.scale.state if self.scale is not None else None
        while True:
            sums, sound = self._gradients(micros, loss, forward)
            self.reduction.check()
            norm = clip_grad_norm(self.model, self.max_grad_norm, 1.0 if self.scale is None else self.scale.value)
            if math.isfinite(norm) or self.scale is None:
                return self._step(sums, norm, lr)
            if not self._on_all(sound) or not self.scale.lower():
                self.scale.state = scale  # which is not to blame
                return self._step(sums, norm, lr)
            # Only gradients have overflowed: the same update again, with a lower scale.
            self.optimizer.zero_grad(set_to_none=True)
            self._experts()

    def _gradients(
        self, micros: Sequence[MicroBatch], loss: MicroLoss, forward: dict[str, Any]
    ) -> tuple[dict[str, Tensor], bool | Tensor]:
        """Forward and backward passes. Returns the sums, and whether losses and outputs are finite."""
        from rlcli.model.parallel.fsdp_sharding import end_cast, keep_cast

        sums: dict[str, Tensor] = {}
        sound: bool | Tensor = True
        for micro in micros:
            progress()
            if self.replicated:  # copies sum their gradients once, with those of the last micro-batch
                self.model.set_requires_all_reduce(micro is micros[-1])
            if self.casts_once:
                keep_cast(self.model, last=micro is micros[-1])
            outputs = self._scaled(self.model(micro.packed, **forward))
            # An empty pack still takes part in the collectives of the backward pass, with a gradient of zero.
            if micro.empty:
                (outputs[0].sum() * 0.0).backward()
                continue
            term, own = loss(micro, outputs)
            # FSDP averages gradients over ranks; the loss is a sum over data ranks.
            finite = _finite(term, outputs[0])
            sound = sound & finite
            (_poisoned(term, outputs[0], finite) * self.data_ranks).backward()
            for name, value in own.items():
                sums[name] = sums[name] + value if name in sums else value
        if self.casts_once:
            end_cast(self.model)
        return sums, sound

    def _scaled(self, outputs: Any) -> Any:
        """Outputs whose gradients are scaled up where they enter the network, if it computes in float16."""
        from rlcli.model.optim import gradient_scaled

        if self.scale is None:
            return outputs
        parts = [None if part is None else gradient_scaled(part, self.scale.value) for part in outputs]
        return getattr(outputs, "_make", tuple)(parts)

    def _on_all(self, sound: bool | Tensor) -> bool:
        """Whether it is so on all ranks. Collective."""
        import torch
        import torch.distributed as dist

        told = torch.as_tensor(sound, dtype=torch.int32, device=next(self.model.parameters()).device)
        dist.all_reduce(told, dist.ReduceOp.MIN)
        return bool(told)

    def _step(self, sums: dict[str, Tensor], norm: float, lr: float) -> dict[str, float]:
        """The optimizer step, unless the gradient is bad: all ranks see the same norm."""
        import torch

        bad = not math.isfinite(norm) or norm > self.bad_grad_norm
        if not bad:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.stepped.before(lr)
            self.optimizer.step()
            if self.scale is not None:
                self.scale.lasted()
            self.copies.check()
            sums |= self.stepped.after()
        self.optimizer.zero_grad(set_to_none=True)
        experts = self._experts()
        if bad:
            return {"bad": 1.0 / self.data_ranks, "grad_norm": norm / self.data_ranks}
        numbers = torch.stack(list(sums.values())).tolist() if sums else []
        alike = {"grad_norm": norm, **experts} | ({} if self.scale is None else {"gradient_scale": self.scale.value})
        return dict(zip(sums, numbers, strict=True)) | {name: one / self.data_ranks for name, one in alike.items()}

    def _experts(self) -> dict[str, float]:
        """How the update's tokens were spread over the experts, if there are any: the same on all ranks."""
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

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.model.stream_weights()

    def stream_changes(self, last: LastSent, most_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        from rlcli.model.tensor_names import named_weights

        return last.changes(named_weights(self.model.lm), self.dtype, most_bytes)

    def stream_base(self) -> Iterator[tuple[str, Tensor]]:
        return self.model.stream_base()

    def save_adapter(self, folder: Path) -> dict[str, Tensor]:
        return self.model.save_adapter(folder)

    def state(self, name: str) -> dict[str, Tensor]:
        from rlcli.model.io.model_state import trained_state

        scale = {} if self.scale is None else {f"{name}.{SCALE}": self.scale.state}
        return trained_state({name: (self.model, self.optimizer)}) | scale

    def load_state(self, folder: Path, name: str) -> None:
        from rlcli.model.io.model_state import load_state

        if self.scale is not None:
            self.scale.state = self.scale.state.clone()  # the old one may be in a checkpoint that is being written
        more = {} if self.scale is None else {f"{name}.{SCALE}": self.scale.state}
        load_state({name: (self.model, self.optimizer)}, folder, progress, more)

    def register(self, offload: Offload, name: str) -> None:
        offload.add(name, self.model, getattr(self, "optimizer", None))


def _ranks(group: ProcessGroup | None) -> Ranks:
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


def _finite(term: Tensor, output: Tensor) -> Tensor:
    import torch

    return torch.isfinite(term.detach()) & torch.isfinite(output.detach()).all()


def _poisoned(term: Tensor, output: Tensor, finite: Tensor) -> Tensor:
    """The loss unchanged or, if it or the output is not `finite`, one whose gradient is NaN: every rank sees that in
    the norm without further communication. (A clipped ratio or a mask can hide a NaN from the gradient.)"""
    import torch

    # Through `output`, which the loss always depends on: 0 · NaN is NaN, and adding 0 changes no bit of a finite loss.
    return term + (output * torch.where(finite, 0.0, math.nan)).sum()
