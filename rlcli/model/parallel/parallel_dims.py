"""Parallel dimensions: how the training workers divide the models and the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

REPLICATE, SHARD = "replicate", "shard"
"""Names of the dimensions of the weights' mesh."""
EXPERT_SHARD, EXPERT = "expert_shard", "expert"
"""Names of the dimensions of the experts' mesh within one replica: of FSDP sharding, and of expert parallelism."""
DATA, CONTEXT = "data", "context"
"""Names of the dimensions of the rows' mesh."""


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the parallel dimensions. The weights of a replica are sharded over shard × context ranks. Ranks of a
    context group, which exchange tokens in every layer, are consecutive; so are the ranks of a replica, which gather
    weights in every pass. Between replicas only gradients are summed, once per update.

    >>> dims = ParallelDims.of(ranks=8, replicate=2, context=2)
    >>> dims, [dims.data_rank(rank) for rank in range(8)]
    (ParallelDims(replicate=2, shard=2, context=2, expert=1), [0, 0, 1, 1, 2, 2, 3, 3])
    """

    replicate: int
    """Replicas of each model (HSDP, arXiv 2304.11277)."""
    shard: int
    """Parts of a step's rows for each replica."""
    context: int = 1
    """Ranks that divide the tokens of a part's packs (Ulysses, arXiv 2309.14509)."""
    expert: int = 1
    """Consecutive ranks that divide a layer's experts (GShard, arXiv 2006.16668): each computes its experts for the
    tokens of all of them, so that expert weights are never gathered over these ranks."""

    @classmethod
    def of(cls, ranks: int, replicate: int, context: int = 1, expert: int = 1) -> ParallelDims:
        assert ranks % (replicate * context) == 0, "the rules check this"
        assert ranks // replicate % expert == 0, "the rules check this"
        return cls(replicate, ranks // (replicate * context), context, expert)

    @property
    def data_size(self) -> int:
        """Number of parts into which a step's rows are divided."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """The part that `rank` computes, together with the other ranks of its context group."""
        return rank // self.context

    def leads(self, rank: int) -> bool:
        """True if `rank` is the first of its context group: the rank that reports for all of them."""
        return rank % self.context == 0

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh of the weights, without the dimension `replicate` if there is only one replica. Collective."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {REPLICATE: self.replicate, SHARD: self.shard * self.context}
        if self.replicate == 1:
            del sizes[REPLICATE]
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def experts_mesh(self, device_type: str) -> DeviceMesh | None:
        """The mesh of the experts' weights with expert parallelism, else None; replicas have the same ranks as in
        `mesh`. Collective."""
        from torch.distributed.device_mesh import init_device_mesh

        if self.expert == 1:
            return None
        sizes = {REPLICATE: self.replicate, EXPERT_SHARD: self.shard * self.context // self.expert, EXPERT: self.expert}
        if self.replicate == 1:
            del sizes[REPLICATE]
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def groups(self, device_type: str) -> tuple[ProcessGroup, ProcessGroup] | None:
        """This rank's data group (one rank of each part) and its context group; None without context parallelism.
        Collective."""
        from torch.distributed.device_mesh import init_device_mesh

        if self.context == 1:
            return None
        mesh = init_device_mesh(device_type, (self.data_size, self.context), mesh_dim_names=(DATA, CONTEXT))
        return mesh.get_group(DATA), mesh.get_group(CONTEXT)
