"""Gathers whole parameters from their FSDP2 shards, many in one collective, for the weight sync to the engine.

Each copy of a replicated model (HSDP) gathers its own shards: nothing crosses between copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlcli.model.parallel.parallel_dims import BESIDE, EXPERT
from rlcli.model.tensor_names import kept_dtype

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
        next_one = group if rows_of(group[0][1]) is None else _Gather(group, dtype)
        if flying is not None:
            yield _landed(flying, dtype)
        flying = next_one
    if flying is not None:
        yield _landed(flying, dtype)


def _landed(flying: _Gather | list[Named], dtype: torch.dtype) -> list[Named]:
    if isinstance(flying, _Gather):
        return flying.whole()
    return [(name, _whole(tensor, kept_dtype(name, dtype))) for name, tensor in flying]


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().to(dtype)  # before gathering: half the traffic in bfloat16
    if not isinstance(tensor, DTensor):
        return tensor
    whole = all(tensor.device_mesh.size(dim) == 1 or one.is_replicate() for dim, one in enumerate(tensor.placements))
    return tensor.to_local() if whole else tensor.full_tensor()


class _Gather:
    """One collective in flight over parameters whose rows are divided among the same ranks, alike (`Rows`).

    Each rank sends as many rows as the one that has most, with arbitrary values in missing ones.
    """

    def __init__(self, group: list[Named], dtype: torch.dtype) -> None:
        self._shards = [(name, cast(DTensor, tensor.detach())) for name, tensor in group]
        self._rows = [_known(shard) for _, shard in self._shards]
        ranks = len(self._rows[0].begins)
        self._sizes = [
            rows.most * shard.shape[1:].numel() for rows, (_, shard) in zip(self._rows, self._shards, strict=True)
        ]
        self._own = torch.empty(sum(self._sizes), dtype=dtype, device=self._shards[0][1].to_local().device)
        for (_, shard), place in zip(self._shards, self._own.split(self._sizes), strict=True):
            local = shard.to_local()
            place[: local.numel()].view_as(local).copy_(local)
        self._all = self._own.new_empty(ranks * len(self._own))
        self._work = all_gather(self._all, self._own, group=self._rows[0].group, async_op=True)

    def whole(self) -> list[Named]:
        """Wait for it. Each tensor is a copy of part of the gathered buffer, or the whole buffer if it is alone."""
        self._work.wait()
        parts = self._all.view(-1, len(self._own)).split(self._sizes, dim=1)
        del self._own, self._all
        return [
            (name, rows.joined(part.unflatten(1, (rows.most, *shard.shape[1:]))))
            for (name, shard), rows, part in zip(self._shards, self._rows, parts, strict=True)
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
    rows, others = rows_of(one), rows_of(other)
    return rows is not None and others is not None and rows.ranks == others.ranks


@dataclass(frozen=True)
class Rows:
    """How the rows of a tensor are divided among ranks. group: theirs. begins, counts: of each rank, its first row and
    their number. rank: this one's place. ranks: equal for tensors that are divided among the same ranks."""

    group: dist.ProcessGroup
    begins: tuple[int, ...]
    counts: tuple[int, ...]
    rank: int
    ranks: object

    @property
    def begin(self) -> int:
        return self.begins[self.rank]

    @property
    def most(self) -> int:
        return max(self.counts)

    def joined(self, parts: Tensor) -> Tensor:
        """The whole tensor, of each rank's rows and padding, `[ranks, most, …]`."""
        if all(begin == min(place * self.most, sum(self.counts)) for place, begin in enumerate(self.begins)):
            # They follow each other, with padding behind the last. Of one number a rank it would be a view with strides
            # that an engine's checks do not know.
            return parts.flatten(0, 1)[: sum(self.counts)].contiguous()
        order = sorted(range(len(self.begins)), key=lambda rank: (self.begins[rank], self.counts[rank]))
        return torch.cat([parts[rank, : self.counts[rank]] for rank in order])


def rows_of(tensor: Tensor) -> Rows | None:
    """How FSDP2 has divided the rows of `tensor` among ranks, after they were divided among those that divide experts;
    None if it has not.

    Of n rows each of W ranks has ⌈n / W⌉, and the last ones fewer or none.
    """
    if not isinstance(tensor, DTensor) or not tensor.numel():
        return None
    mesh, placed = tensor.device_mesh, enumerate(tensor.placements)
    dims = [dim for dim, one in placed if mesh.size(dim) > 1 and not one.is_replicate()]
    # By attribute: the class of what is divided twice is not torch's `Shard`.
    if any(getattr(tensor.placements[dim], "dim", None) != 0 for dim in dims):
        return None
    if len(dims) == 1:
        divided = _divided(tensor.shape[0], (mesh.size(dims[0]),))
        return Rows(mesh.get_group(dims[0]), *divided, mesh.get_local_rank(dims[0]), (mesh, dims[0]))
    if len(dims) == 2 and mesh.mesh_dim_names is not None and mesh.mesh_dim_names[-2:] == (BESIDE, EXPERT):
        divided = _divided(tensor.shape[0], (mesh.size(dims[0]), mesh.size(dims[1])))
        group = _COPIES[_copy_of(mesh)]
        return Rows(group, *divided, dist.get_rank(group), mesh)
    return None


def note_copy(group: dist.ProcessGroup) -> None:
    """Have `rows_of` know the group of all ranks of this rank's copy of the model: the mesh of a tensor whose rows are
    divided twice has only groups that divide them once."""
    _COPIES[tuple(sorted(dist.get_process_group_ranks(group)))] = group


_COPIES: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _copy_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks that have this one's copy of the model."""
    ranks = mesh.mesh if mesh.ndim == 2 else mesh.mesh[mesh.get_local_rank(0)]
    return tuple(sorted(ranks.flatten().tolist()))


def _known(tensor: Tensor) -> Rows:
    rows = rows_of(tensor)
    assert rows is not None, "they are grouped by it"
    return rows


@cache
def _divided(rows: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first row of each rank, and their number: of `rows` rows over ranks, or over ranks that divide experts and,
    of each part, over those beside; sizes: (ranks,), or (beside, expert), of which these are neighbours. Cached: a sync
    asks for each parameter."""
    if len(sizes) == 1:
        counts = _chunks(rows, sizes[0])
        return _begins(counts), counts
    beside, expert = sizes
    blocks = _chunks(rows, expert)
    chunks = [_chunks(block, beside) for block in blocks]
    starts = [[first + own for own in _begins(chunk)] for first, chunk in zip(_begins(blocks), chunks, strict=True)]
    places = [(part, place) for place in range(beside) for part in range(expert)]
    return tuple(starts[part][place] for part, place in places), tuple(chunks[part][place] for part, place in places)


def _chunks(count: int, ranks: int) -> tuple[int, ...]:
    """As torch divides `count` rows."""
    each = -(-count // ranks)
    return tuple(max(0, min(each, count - each * rank)) for rank in range(ranks))


def _begins(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(counts, initial=0))[:-1]
