"""Gathers full parameters from their FSDP2 shards, many in one collective, for the weight sync to the engine.

Each replica (HSDP) gathers its shards: there is no communication between replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlcli.model.parallel.parallel_dims import EXPERT, EXPERT_SHARD
from rlcli.model.tensor_names import kept_dtype

if TYPE_CHECKING:
    from jaxtyping import Shaped

NamedTensor = tuple[str, Tensor]
"""A parameter with its name."""

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Renamed in torch 2.13."""

BUCKET_BYTES = 32 << 20
"""Size of gathered parameters in one collective: large enough that its start costs little, and small enough that gloo,
which allocates new memory each time, is no slower than with one tensor at a time (it is from 256 MiB on)."""


def buckets(
    weights: Iterable[NamedTensor], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[list[NamedTensor]]:
    """The full parameters `weights` in `dtype`, in their order, at most `bucket_bytes` bytes at a time, or one larger
    parameter. Collective: every rank iterates to the end, in step.

    The next bucket is gathered while one is used, so that two are in memory and never the model. Unsharded tensors (on
    one rank, all) are yielded unchanged and may be the parameter itself: copy what must outlast the next update. The
    caller may keep all others.

        for bucket in buckets(model.named_parameters(), torch.bfloat16):
            for name, tensor in bucket: ...
    """
    in_flight: _Gather | list[NamedTensor] | None = None
    for group in _grouped(weights, dtype, bucket_bytes):
        upcoming = group if rows_of(group[0][1]) is None else _Gather(group, dtype)
        if in_flight is not None:
            yield _finished(in_flight, dtype)
        in_flight = upcoming
    if in_flight is not None:
        yield _finished(in_flight, dtype)


def _finished(in_flight: _Gather | list[NamedTensor], dtype: torch.dtype) -> list[NamedTensor]:
    """The full parameters of a group, after its collective if it needs one."""
    if isinstance(in_flight, _Gather):
        return in_flight.wait()
    return [(name, _full(tensor, kept_dtype(name, dtype))) for name, tensor in in_flight]


def _full(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The full tensor in `dtype`: gathered by itself if it is sharded."""
    tensor = tensor.detach().to(dtype)  # before gathering: half the traffic in bfloat16
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    is_full = all(mesh.size(dim) == 1 or placement.is_replicate() for dim, placement in enumerate(tensor.placements))
    return tensor.to_local() if is_full else tensor.full_tensor()


class _Gather:
    """One collective in flight over parameters whose rows are divided among the same ranks (`Rows`).

    Each rank sends as many rows as the rank with the most, with arbitrary values in missing ones.
    """

    def __init__(self, group: list[NamedTensor], dtype: torch.dtype) -> None:
        self._shards = [(name, cast(DTensor, tensor.detach())) for name, tensor in group]
        self._rows = [_sharded_rows(shard) for _, shard in self._shards]
        ranks = len(self._rows[0].begins)
        self._sizes = [
            rows.most * shard.shape[1:].numel() for rows, (_, shard) in zip(self._rows, self._shards, strict=True)
        ]
        self._sent = torch.empty(sum(self._sizes), dtype=dtype, device=self._shards[0][1].to_local().device)
        for (_, shard), part in zip(self._shards, self._sent.split(self._sizes), strict=True):
            local = shard.to_local()
            part[: local.numel()].view_as(local).copy_(local)
        self._received = self._sent.new_empty(ranks * len(self._sent))
        work = all_gather(self._received, self._sent, group=self._rows[0].group, async_op=True)
        assert work is not None, "this rank belongs to the group"
        self._work = work

    def wait(self) -> list[NamedTensor]:
        """The full parameters: each a copy of its part of the gathered buffer, or the buffer if there is only one."""
        self._work.wait()
        parts = self._received.view(-1, len(self._sent)).split(self._sizes, dim=1)
        del self._sent, self._received
        return [
            (name, rows.joined(part.unflatten(1, (rows.most, *shard.shape[1:]))))
            for (name, shard), rows, part in zip(self._shards, self._rows, parts, strict=True)
        ]


def _grouped(weights: Iterable[NamedTensor], dtype: torch.dtype, bucket_bytes: int) -> Iterator[list[NamedTensor]]:
    """Groups of consecutive parameters for one collective; a parameter that needs none is a group by itself."""
    group: list[NamedTensor] = []
    size = 0
    for name, tensor in weights:
        nbytes = tensor.numel() * dtype.itemsize
        if group and not (_share_ranks(group[0][1], tensor) and size + nbytes <= bucket_bytes):
            yield group
            group, size = [], 0
        group.append((name, tensor))
        size += nbytes
    if group:
        yield group


def _share_ranks(tensor: Tensor, other: Tensor) -> bool:
    """True if the rows of both are divided among the same ranks."""
    rows, other_rows = rows_of(tensor), rows_of(other)
    return rows is not None and other_rows is not None and rows.ranks == other_rows.ranks


@dataclass(frozen=True)
class Rows:
    """Division of a tensor's rows among ranks."""

    group: dist.ProcessGroup
    """The ranks that have some of the rows."""
    begins: tuple[int, ...]
    """First row of each rank."""
    counts: tuple[int, ...]
    """Number of rows of each rank."""
    rank: int
    """This rank's index in the group."""
    ranks: object
    """Equal for tensors that are divided among the same ranks."""

    @property
    def begin(self) -> int:
        """First row of this rank."""
        return self.begins[self.rank]

    @property
    def most(self) -> int:
        """Number of rows of the rank that has the most."""
        return max(self.counts)

    def joined(self, parts: Shaped[Tensor, "ranks most ..."]) -> Tensor:
        """The full tensor, from each rank's rows with padding."""
        if all(begin == min(rank * self.most, sum(self.counts)) for rank, begin in enumerate(self.begins)):
            # The parts are consecutive, with padding only at the end. A copy: with one row per rank the view would have
            # unusual strides, with which the engine's checks do not match it.
            return parts.flatten(0, 1)[: sum(self.counts)].contiguous()
        order = sorted(range(len(self.begins)), key=lambda rank: (self.begins[rank], self.counts[rank]))
        return torch.cat([parts[rank, : self.counts[rank]] for rank in order])


def rows_of(tensor: Tensor) -> Rows | None:
    """The division of the rows of `tensor` among ranks by FSDP2 and expert parallelism; None if it is not sharded.

    Of n rows each of W ranks has ⌈n / W⌉, and the last ones fewer or none.
    """
    if not isinstance(tensor, DTensor) or not tensor.numel():
        return None
    mesh, placements = tensor.device_mesh, enumerate(tensor.placements)
    dims = [dim for dim, placement in placements if mesh.size(dim) > 1 and not placement.is_replicate()]
    # By attribute: the placement of a tensor that is sharded twice is not an instance of torch's `Shard`.
    if any(getattr(tensor.placements[dim], "dim", None) != 0 for dim in dims):
        return None
    if len(dims) == 1:
        begins, counts = _divided(tensor.shape[0], (mesh.size(dims[0]),))
        return Rows(mesh.get_group(dims[0]), begins, counts, mesh.get_local_rank(dims[0]), (mesh, dims[0]))
    if len(dims) == 2 and mesh.mesh_dim_names is not None and mesh.mesh_dim_names[-2:] == (EXPERT_SHARD, EXPERT):
        begins, counts = _divided(tensor.shape[0], (mesh.size(dims[0]), mesh.size(dims[1])))
        group = _REPLICA_GROUPS[_replica_ranks(mesh)]
        return Rows(group, begins, counts, dist.get_rank(group), mesh)
    return None


def note_copy(group: dist.ProcessGroup) -> None:
    """Register the group of all ranks of this rank's replica for `rows_of`: the mesh of a tensor that is sharded twice
    only has groups for each of the two dimensions."""
    _REPLICA_GROUPS[tuple(sorted(dist.get_process_group_ranks(group)))] = group


_REPLICA_GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""Ranks of a replica, ascending → their group."""


def _replica_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of this rank's replica, ascending."""
    ranks = mesh.mesh if mesh.ndim == 2 else mesh.mesh[mesh.get_local_rank(0)]
    return tuple(sorted(ranks.flatten().tolist()))


def _sharded_rows(tensor: Tensor) -> Rows:
    rows = rows_of(tensor)
    assert rows is not None, "they are grouped by it"
    return rows


@cache
def _divided(rows: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first row of each rank, and its number of rows.

    sizes: (ranks,), or (fsdp, expert) if rows are divided over `expert` ranks and each part again over `fsdp` ranks;
    ranks of one expert group are consecutive. Cached: each weight sync calls it for each parameter."""
    if len(sizes) == 1:
        counts = _chunks(rows, sizes[0])
        return _begins(counts), counts
    fsdp, expert = sizes
    blocks = _chunks(rows, expert)
    chunks = [_chunks(block, fsdp) for block in blocks]
    starts = [[first + start for start in _begins(chunk)] for first, chunk in zip(_begins(blocks), chunks, strict=True)]
    ranks = [(part, shard) for shard in range(fsdp) for part in range(expert)]
    return tuple(starts[part][shard] for part, shard in ranks), tuple(chunks[part][shard] for part, shard in ranks)


def _chunks(count: int, ranks: int) -> tuple[int, ...]:
    """Rows of each rank, as torch divides `count` rows."""
    rows_per_rank = -(-count // ranks)
    return tuple(max(0, min(rows_per_rank, count - rows_per_rank * rank)) for rank in range(ranks))


def _begins(counts: Sequence[int]) -> tuple[int, ...]:
    """First row of each rank."""
    return tuple(accumulate(counts, initial=0))[:-1]
