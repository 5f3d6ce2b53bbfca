"""FSDP2: shards a model over the mesh, layer by layer unless it is small (ZeRO-3, arXiv 1910.02054), and fills it: each
rank reads its own rows, or rank 0 reads all. Over a mesh of two dimensions, `rlcli.model.parallel.parallel_dims`, it is
replicated over the first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
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
"""Up to this size, in compute dtype, a model is gathered whole, once per micro-batch: one message per layer, with ranks
waiting for each other in each, would cost more than the memory is worth. Above it, the gathering takes as long as it
saves."""


def shard(model: Decoder, mesh: DeviceMesh, experts: DeviceMesh | None = None) -> None:
    """Shard `model`, whose parameters may be on the meta device, in place: each decoder layer and the rest separately,
    so that one layer is whole at a time, or all of a model of up to WHOLE_BYTES as one.

    experts: the mesh of the experts' weights, if ranks divide them.

    In 16 bits it computes in these, reduces and accumulates gradients in float32 and leaves the parameters unchanged.
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


def _reshard_without_backward(model: FSDPModule, *_: object) -> None:
    """The root stays gathered from its forward to its backward pass. If no backward follows, `parameters()` would be
    whole copies in compute dtype: an optimizer built on them would train nothing, and weight sync would lose precision.
    """
    if not torch.is_grad_enabled():
        model.reshard()


def casts_once(model: Decoder, dims: ParallelDims, device_type: str) -> bool:
    """Whether `model` keeps its weights in compute dtype from one micro-batch of an update to the next (`keep_cast`):
    where one rank has whole weights, on a GPU. FSDP2 would cast and copy each of them in every forward and every
    backward pass. They take as much memory as the model in compute dtype, which the planner counts; a CPU has seldom
    that much to spare, and an adapter's base, which is most of its model, would be there twice."""
    adapted = any(is_adapter(name) for name, _ in model.named_parameters())
    one_shard = dims.shard * dims.context == 1
    return one_shard and device_type == "cuda" and not adapted and isinstance(model, FSDPModule)


def keep_cast(model: FSDPModule, *, last: bool) -> None:
    """Before a micro-batch's passes: have its weights, once they are cast, stay until the backward pass of the `last`
    one. Until then its gradients are added up in float32, as reduced ones are, and are reduced once: of one shard both
    give the same bits."""
    model.set_reshard_after_backward(last)
    model.set_requires_gradient_sync(last)
    _reshard_layers_after_forward(model, False)


def end_cast(model: FSDPModule) -> None:
    """After the last one: passes without a gradient hold one layer at a time."""
    _reshard_layers_after_forward(model, True)


def _reshard_layers_after_forward(model: Any, on: bool) -> None:
    """Not the root, which is needed again at once."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and module is not model:
            module.set_reshard_after_forward(on, recurse=False)


def fill_from_files(model: Decoder, files: WeightFiles, device: torch.device) -> None:
    """Allocate a model that is on the meta device, sharded or not, and read this rank's rows of each parameter, and
    what is fixed; other buffers keep their values. Not collective."""
    _allocate(model, device)
    model.lm.tie_weights()  # allocating memory untied tied parameters, which are to be read once
    with torch.no_grad():
        for name, parameter in named_weights(model.lm):
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            rows = rows_of(parameter)
            if own.numel():
                own.copy_(files.rows(name, rows.begin if rows is not None else 0, len(own), device))


def fill_from_rank0(model: Decoder, state: Mapping[str, Tensor], device: torch.device) -> None:
    """Allocate a sharded model that is on the meta device and load rank 0's weights; buffers that are
    not fixed weights keep their values.

    Collective. state, on rank 0: every parameter and fixed tensor under its name in `model.lm`, tied ones under
    each of their names; empty on other ranks.
    """
    # Broadcast tensor by tensor, each rank keeping its part: no rank but the first ever holds the whole model.
    _allocate(model, device)
    set_model_state_dict(
        model,
        {f"lm.{name}": tensor for name, tensor in state.items()},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True),
    )


def _allocate(model: Decoder, device: torch.device) -> None:
    """Memory for a model that is on the meta device, whose buffers keep their values."""
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
