"""Parallel dimensions: how the workers that train divide the models and the rows of a step among themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

REPLICATE, SHARD = "replicate", "shard"
"""Names of the dimensions of the weights' mesh."""
BESIDE, EXPERT = "beside", "expert"
"""Names of the dimensions of the experts' mesh that divide a copy of the model."""
DATA, CONTEXT = "data", "context"
"""Names of the dimensions of the rows' mesh."""


@dataclass(frozen=True)
class ParallelDims:
    """`replicate` copies of each model (HSDP, arXiv 2304.11277), each for `shard` parts of a step's rows, and `context`
    ranks for each part, which divide its tokens (Ulysses, arXiv 2309.14509). A copy's weights are sharded over shard ×
    context ranks, of which `expert` neighbours divide a layer's experts (GShard, arXiv 2006.16668): each computes its
    own ones for the tokens of all of them, so that experts are never gathered over these ranks.

    The ranks of one part, which exchange tokens in every layer, are neighbours; so are those of one copy, which gather
    weights in every pass. Between copies only gradients are summed, once an update.

    >>> dims = ParallelDims.of(ranks=8, replicate=2, context=2)
    >>> dims, [dims.data_rank(rank) for rank in range(8)]
    (ParallelDims(replicate=2, shard=2, context=2, expert=1), [0, 0, 1, 1, 2, 2, 3, 3])
    """

    replicate: int
    shard: int
    context: int = 1
    expert: int = 1

    @classmethod
    def of(cls, ranks: int, replicate: int, context: int = 1, expert: int = 1) -> ParallelDims:
        assert ranks % (replicate * context) == 0, "the rules check this"
        assert ranks // replicate % expert == 0, "the rules check this"
        return cls(replicate, ranks // (replicate * context), context, expert)

    @property
    def data_size(self) -> int:
        """Number of parts that a step's rows are divided into."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """Which of them `rank` computes, together with the other ranks of its context."""
        return rank // self.context

    def leads(self, rank: int) -> bool:
        """Whether it is the first rank of its part: what all ranks of a part know, it alone reports."""
        return rank % self.context == 0

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh of the weights, without the dimension `replicate` if there is only one copy. Collective."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {REPLICATE: self.replicate, SHARD: self.shard * self.context}
        if self.replicate == 1:
            del sizes[REPLICATE]
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def experts_mesh(self, device_type: str) -> DeviceMesh | None:
        """The mesh of the experts' weights, if they are divided; a copy has the same ranks as in `mesh`. Collective."""
        from torch.distributed.device_mesh import init_device_mesh

        if self.expert == 1:
            return None
        sizes = {REPLICATE: self.replicate, BESIDE: self.shard * self.context // self.expert, EXPERT: self.expert}
        if self.replicate == 1:
            del sizes[REPLICATE]
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return mesh

    def groups(self, device_type: str) -> tuple[ProcessGroup, ProcessGroup] | None:
        """This rank's group of the ranks with the other parts, and that of the ranks which divide its part's tokens;
        None if no part is divided. Collective."""
        from torch.distributed.device_mesh import init_device_mesh

        if self.context == 1:
            return None
        mesh = init_device_mesh(device_type, (self.data_size, self.context), mesh_dim_names=(DATA, CONTEXT))
        return mesh.get_group(DATA), mesh.get_group(CONTEXT)
