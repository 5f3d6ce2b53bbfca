"""FSDP2: shards a model over the mesh, layer by layer unless it is small (ZeRO-3, arXiv 1910.02054), and loads its
weights: each rank reads its rows, or rank 0 reads and broadcasts. On a mesh of two dimensions
(`rlcli.model.parallel.parallel_dims`) the model is replicated over the first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlcli.model.decoder import Decoder, blocks
from rlcli.model.lora import is_adapter
from rlcli.model.parallel.buckets import note_copy, rows_of
from rlcli.model.parallel.expert_parallel import divide_experts
from rlcli.model.parallel.parallel_dims import ParallelDims
from rlcli.model.tensor_names import named_weights

if TYPE_CHECKING:
    from rlcli.model.io.weight_files import WeightFiles

WHOLE_BYTES = 24 << 20
"""Size in compute dtype up to which all weights of a model are gathered at once, once per micro-batch: one collective
per layer would cost more time than the memory is worth. Above it, layer by layer is as fast
(`scripts/bench/sharding.py`)."""


def shard(model: Decoder, mesh: DeviceMesh, experts: DeviceMesh | None = None) -> None:
    """Shard `model`, whose parameters may be on the meta device, in place: each decoder layer and the rest separately,
    so that one layer is gathered at a time; a model of up to WHOLE_BYTES as one unit.

    experts: mesh of the experts' weights, with expert parallelism.

    A model in 16 bits computes in these, reduces and accumulates gradients in float32 and keeps its parameters' dtype.
    """
    half = model.dtype != torch.float32
    precision = (
        MixedPrecisionPolicy(param_dtype=model.dtype, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    )
    if experts is not None:
        note_copy(mesh.get_group(mesh.ndim - 1))
        divide_experts(model, experts, mesh.size(), precision)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    small = parameters * model.dtype.itemsize <= WHOLE_BYTES
    for layer in () if small else blocks(model.lm):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.register_forward_hook(_reshard_without_backward)


def _reshard_without_backward(model: nn.Module, *_: object) -> None:
    """Forward hook. The root stays gathered from its forward to its backward pass. If no backward follows,
    `parameters()` would be gathered copies in compute dtype: an optimizer built on them would train nothing, and weight
    sync would lose precision.
    """
    if not torch.is_grad_enabled():
        assert isinstance(model, FSDPModule)
        model.reshard()


def casts_once(model: Decoder, dims: ParallelDims, device_type: str) -> bool:
    """True if `model` keeps its weights in compute dtype from one micro-batch of an update to the next (`keep_cast`):
    on a GPU if each rank has all weights. Without it FSDP2 casts and copies all of them in each forward and backward
    pass. The copies take as much memory as the model in compute dtype, which the planner counts; CPUs seldom have that
    much to spare, and the base of an adapter would be in memory twice."""
    adapted = any(is_adapter(name) for name, _ in model.named_parameters())
    one_shard = dims.shard * dims.context == 1
    return one_shard and device_type == "cuda" and not adapted and isinstance(model, FSDPModule)


def keep_cast(model: nn.Module | FSDPModule, *, last: bool) -> None:
    """Before the passes of a micro-batch: keep the cast weights until the backward pass of the `last` micro-batch.
    Until then gradients are accumulated in float32 and reduced once. With one shard that gives the same bits as
    reducing each time."""
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(last)
    model.set_requires_gradient_sync(last)
    _reshard_layers_after_forward(model, False)


def end_cast(model: nn.Module | FSDPModule) -> None:
    """After the last micro-batch: passes without gradients gather one layer at a time again."""
    _reshard_layers_after_forward(model, True)


def _reshard_layers_after_forward(model: nn.Module | FSDPModule, on: bool) -> None:
    """Set it for all layers but the root, which the backward pass needs at once."""
    for module in cast(nn.Module, model).modules():
        if isinstance(module, FSDPModule) and module is not model:
            module.set_reshard_after_forward(on, recurse=False)


def fill_from_files(model: Decoder, files: WeightFiles, device: torch.device) -> None:
    """Allocate a model that is on the meta device, sharded or not, and read this rank's rows of each parameter and the
    fixed tensors; other buffers keep their values. Not collective."""
    _allocate(model, device)
    model.lm.tie_weights()  # allocating memory untied tied parameters, which are to be read once
    with torch.no_grad():
        for name, parameter in named_weights(model.lm):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            rows = rows_of(parameter)
            if local.numel():
                local.copy_(files.rows(name, rows.begin if rows is not None else 0, len(local), device))


def fill_from_rank0(model: Decoder, state: Mapping[str, Tensor], device: torch.device) -> None:
    """Allocate a sharded model that is on the meta device and load rank 0's weights; buffers that are
    not fixed weights keep their values.

    Collective. state, on rank 0: every parameter and fixed tensor under its name in `model.lm`, tied ones under
    each of their names; empty on other ranks.
    """
    # Broadcast tensor by tensor, of which each rank keeps its part: only rank 0 ever holds the full model.
    _allocate(model, device)
    set_model_state_dict(
        model,
        {f"lm.{name}": tensor for name, tensor in state.items()},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True),
    )


def _allocate(model: Decoder, device: torch.device) -> None:
    """Allocate memory for a model that is on the meta device; buffers keep their values."""
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
