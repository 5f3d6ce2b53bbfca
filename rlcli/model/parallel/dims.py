"""Parallel dimensions: how the workers that train divide the models and the rows of a step among themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICATE, SHARD = "replicate", "shard"
"""Names of the dimensions of the mesh."""


@dataclass(frozen=True)
class ParallelDims:
    """`replicate` copies of each model, each sharded over `shard` ranks (HSDP, arXiv 2304.11277).

    Rank r holds part r mod shard of copy r // shard. So the ranks of one copy, which gather weights in every pass, are
    neighbours, mostly on one machine; between copies only gradients are summed, once an update.

    >>> dims = ParallelDims.of(ranks=4, replicate=2)
    >>> dims, [dims.data_rank(rank) for rank in range(4)]
    (ParallelDims(replicate=2, shard=2), [0, 1, 2, 3])
    """

    replicate: int
    shard: int

    @classmethod
    def of(cls, ranks: int, replicate: int) -> ParallelDims:
        assert ranks % replicate == 0, "the rules check this"
        return cls(replicate, ranks // replicate)

    def data_rank(self, rank: int) -> int:
        """Which part of a step's rows `rank` computes. Every rank of replicate × shard has rows of its own; the ranks
        of a dimension that divides the rows' tokens or the layers (context, tensor) would share a data rank."""
        return rank

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh of all ranks, without the dimension `replicate` if there is only one copy. Collective."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {REPLICATE: self.replicate, SHARD: self.shard}
        if self.replicate == 1:
            del sizes[REPLICATE]
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
