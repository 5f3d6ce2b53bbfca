"""Gathers whole parameters from their FSDP2 shards, many in one collective, for the weight sync to the engine.

Each copy of a replicated model (HSDP) gathers its own shards: nothing crosses between copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

Named = tuple[str, Tensor]

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Renamed in torch 2.13."""

BUCKET_BYTES = 32 << 20
"""Size of gathered parameters in one collective: large enough that its start costs little, and small enough that gloo,
which uses newly allocated memory each time, is no slower than with one tensor at a time (it is from 256 MiB on)."""


def buckets(named: Iterable[Named], dtype: torch.dtype, most_bytes: int = BUCKET_BYTES) -> Iterator[list[Named]]:
    """The parameters `named` in `dtype` and whole, in their order, at most `most_bytes` bytes at a time, or one larger
    parameter. Collective: every rank iterates to the end, in step.

    The next bucket is gathered while one is used, so that two are in memory and never the model. Unsharded tensors (on
    one rank, all) are yielded unchanged and may be the parameter itself: copy what must outlast the next update. The
    caller may keep all others.

        for bucket in buckets(model.named_parameters(), torch.bfloat16):
            for name, tensor in bucket: ...
    """
    flying: _Gather | list[Named] | None = None
    for group in _grouped(named, dtype, most_bytes):
        dim = row_sharded_dim(group[0][1])
        next_one = group if dim is None else _Gather(group, dim, dtype)
        if flying is not None:
            yield _landed(flying, dtype)
        flying = next_one
    if flying is not None:
        yield _landed(flying, dtype)


def _landed(flying: _Gather | list[Named], dtype: torch.dtype) -> list[Named]:
    if isinstance(flying, _Gather):
        return flying.whole()
    return [(name, _whole(tensor, dtype)) for name, tensor in flying]


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().to(dtype)  # before gathering: half the traffic in bfloat16
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor() if _divided_dims(tensor) else tensor.to_local()


class _Gather:
    """One collective in flight over parameters that are sharded over the mesh dimension `dim`.

    Of a tensor [n, …] FSDP2 gives each of W ranks ⌈n / W⌉ rows, and the last ones fewer or none. Here each sends ⌈n /
    W⌉ rows, with arbitrary values in missing ones: the concatenated parts of the ranks then begin with the tensor,
    followed by padding.
    """

    def __init__(self, group: list[Named], dim: int, dtype: torch.dtype) -> None:
        self._shards = [(name, cast(DTensor, tensor.detach())) for name, tensor in group]
        mesh = self._shards[0][1].device_mesh
        self._sizes = [_sent(shard, mesh.size(dim)) for _, shard in self._shards]
        self._own = torch.empty(sum(self._sizes), dtype=dtype, device=self._shards[0][1].to_local().device)
        for (_, shard), place in zip(self._shards, self._own.split(self._sizes), strict=True):
            local = shard.to_local()
            place[: local.numel()].view_as(local).copy_(local)
        self._all = self._own.new_empty(mesh.size(dim) * len(self._own))
        self._work = all_gather(self._all, self._own, group=mesh.get_group(dim), async_op=True)

    def whole(self) -> list[Named]:
        """Wait for it. Each tensor is a copy of part of the gathered buffer, or the whole buffer if it is alone."""
        self._work.wait()
        parts = self._all.view(-1, len(self._own)).split(self._sizes, dim=1)
        del self._own, self._all
        return [
            (name, part.reshape(-1, *shard.shape[1:])[: shard.shape[0]])
            for (name, shard), part in zip(self._shards, parts, strict=True)
        ]


def _grouped(named: Iterable[Named], dtype: torch.dtype, most_bytes: int) -> Iterator[list[Named]]:
    """Groups of neighbours for one collective; those that need none are grouped alone."""
    group: list[Named] = []
    size = 0
    for name, tensor in named:
        own = tensor.numel() * dtype.itemsize
        if group and not (_together(group[0][1], tensor) and size + own <= most_bytes):
            yield group
            group, size = [], 0
        group.append((name, tensor))
        size += own
    if group:
        yield group


def _together(one: Tensor, other: Tensor) -> bool:
    dim = row_sharded_dim(one)
    if dim is None or dim != row_sharded_dim(other):
        return False
    return bool(cast(DTensor, one).device_mesh == cast(DTensor, other).device_mesh)


def _divided_dims(tensor: DTensor) -> list[int]:
    """Mesh dimensions over which its elements are divided; over the others it is whole on every rank."""
    placed = enumerate(tensor.placements)
    return [dim for dim, placement in placed if tensor.device_mesh.size(dim) > 1 and not placement.is_replicate()]


def row_sharded_dim(tensor: Tensor) -> int | None:
    """The mesh dimension over which FSDP2 has sharded its rows; None if it has not. Others gather themselves."""
    if not isinstance(tensor, DTensor) or not tensor.numel():
        return None
    dims = _divided_dims(tensor)
    placements = [tensor.placements[dim] for dim in dims]
    by_rows = [type(placement) is Shard and placement.dim == 0 for placement in placements]
    return dims[0] if by_rows == [True] else None


def _sent(shard: DTensor, ranks: int) -> int:
    """Number of its elements that each of `ranks` ranks sends."""
    return int(-(-shard.shape[0] // ranks) * shard.shape[1:].numel())
