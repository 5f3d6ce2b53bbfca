"""Context parallelism: ranks divide the tokens of a pack, and for attention its heads (DeepSpeed-Ulysses, arXiv
2309.14509).

Every layer but attention computes on a contiguous run of the pack's tokens. For attention an all-to-all exchanges a run
with all heads for all tokens with some heads, and back. So sequences, shared prompts and branches may cross the runs,
and attention itself is the same as without context parallelism. A rank holds 1 / ranks of the pack's activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from rlcli.model.attention import Attention
from rlcli.model.device_copies import upload
from rlcli.model.packed import PackedBatch
from rlcli.model.parallel.buckets import all_gather
from rlcli.model.parallel.row_exchange import exchange

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class Heads:
    """Assignment of attention heads to the ranks of a context group.

    Query heads are divided as evenly as possible. A KV head goes to every rank that has one of its query heads.

    >>> Heads.of(queries=6, kvs=2, ranks=4, rank=1)
    Heads(query=((0, 1), (2, 3), (4,), (5,)), kv=((0,), (0, 1), (1,), (1,)), kv_of_query=None)
    >>> Heads.of(queries=6, kvs=2, ranks=2, rank=0).kv_of_query is None
    True
    >>> Heads.of(queries=5, kvs=5, ranks=2, rank=0).kv
    ((0, 1, 2), (3, 4))
    """

    query: tuple[tuple[int, ...], ...]
    """Query heads of each rank."""
    kv: tuple[tuple[int, ...], ...]
    """KV heads of each rank."""
    kv_of_query: tuple[int, ...] | None
    """For each query head of this rank the index of its KV head among this rank's; None if each KV head has equally
    many query heads, in order."""

    @classmethod
    def of(cls, queries: int, kvs: int, ranks: int, rank: int) -> Heads:
        """queries, kvs: heads of a layer."""
        heads_per_rank, remainder = divmod(queries, ranks)
        assert heads_per_rank, "the rules check that each rank has a head"
        query, kv, start = [], [], 0
        for index in range(ranks):
            heads = range(start, start + heads_per_rank + (index < remainder))
            query.append(tuple(heads))
            kv.append(tuple(sorted({head * kvs // queries for head in heads})))
            start = heads.stop
        kv_of_query = tuple(kv[rank].index(head * kvs // queries) for head in query[rank])
        group_size, remainder = divmod(len(query[rank]), len(kv[rank]))
        even = not remainder and kv_of_query == tuple(index // group_size for index in range(len(kv_of_query)))
        return cls(tuple(query), tuple(kv), None if even else kv_of_query)


class ContextGroup:
    """The ranks that divide the tokens of the same packs. group: their process group."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def run_of(self, batch: PackedBatch) -> Run:
        """This rank's run of a pack. All ranks of the group pass the same pack."""
        each = -(-batch.tokens // self.size)
        start, missing = self.rank * each, self.size * each - batch.tokens
        owner = batch.host_response_index // each
        by_rank = np.argsort(owner, kind="stable")
        order = np.empty_like(by_rank)
        order[by_rank] = np.arange(len(owner))
        indexes = [torch.from_numpy(values) for values in (np.flatnonzero(owner == self.rank), order)]
        mine, in_order = upload(indexes, batch.targets.device)

        def part(values: Tensor, fill: int = 0) -> Tensor:
            padding = [0, 0] * (values.ndim - 1) + [0, missing]
            return F.pad(values, padding, value=fill)[start : start + each]

        return Run(
            ranks=self,
            tokens=batch.tokens,
            each=each,
            input_ids=part(batch.input_ids),
            position_ids=part(batch.position_ids),
            mine=mine,
            response_index=batch.response_index.index_select(0, mine) - start,
            targets=batch.targets.index_select(0, mine),
            candidates=None if batch.candidates is None else batch.candidates.index_select(0, mine),
            order=in_order,
            counts=tuple(np.bincount(owner, minlength=self.size).tolist()),
            routes=None if batch.routes is None else part(batch.routes, -1),
        )


@dataclass(frozen=True)
class Run:
    """The contiguous tokens of a pack that one rank computes, equally many on each rank; the last run ends with
    padding, which attends to nothing. Implements `rlcli.model.attention.Divided`."""

    ranks: ContextGroup
    """The ranks that divide the pack."""
    tokens: int
    """T, tokens of the pack."""
    each: int
    """Tokens of a run, padding included."""
    input_ids: Int[Tensor, " each"]
    """As `PackedBatch.input_ids`, for the run; padding is 0."""
    position_ids: Int[Tensor, "... each"]
    """As `PackedBatch.position_ids`, for the run; padding is 0."""
    mine: Int[Tensor, " local_R"]
    """int64: index of each response token that this rank predicts among the R of the pack."""
    response_index: Int[Tensor, " local_R"]
    """As `PackedBatch.response_index`, for `mine`, counted from the start of the run."""
    targets: Int[Tensor, " local_R"]
    """As `PackedBatch.targets`, for `mine`."""
    candidates: Int[Tensor, "local_R K"] | None
    """As `PackedBatch.candidates`, for `mine`."""
    order: Int[Tensor, " R"]
    """The index of each of the pack's response tokens among those of all ranks, rank after rank."""
    counts: tuple[int, ...]
    """Response tokens that each rank predicts."""
    routes: Int[Tensor, "each layers K"] | None = None
    """As `PackedBatch.routes`, for the run; padding is −1."""

    def gather(self, values: Float[Tensor, "local_R ..."]) -> Float[Tensor, "R ..."]:
        """The values of all ranks for the response tokens that each predicts, in the pack's order. Collective, and so
        is the backward pass, in which all ranks must pass the same gradient: each of them computes the full loss."""
        gathered: Tensor = _Gather.apply(values, self)
        return gathered

    def attend(
        self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """As `Divided.attend`. Collective."""
        heads = Heads.of(query.shape[1], key.shape[1], self.ranks.size, self.ranks.rank)
        query = self._to_heads(query, heads.query)
        key, value = (self._to_heads(x, heads.kv) for x in (key, value))
        if heads.kv_of_query is not None:
            kv_of_query = _index(heads.kv_of_query, key.device)
            key, value = (x.index_select(1, kv_of_query) for x in (key, value))
        local_heads = heads.query[self.ranks.rank]  # consecutive
        local_sinks = None if sinks is None else sinks[local_heads[0] : local_heads[-1] + 1]
        return self._to_tokens(attention(query, key, value, local_sinks), heads.query)

    def _to_heads(
        self, x: Float[Tensor, "each heads D"], heads: Sequence[Sequence[int]]
    ) -> Float[Tensor, "T local_heads D"]:
        """From a run with all heads to all tokens with this rank's heads. heads: those of each rank, consecutive."""
        local_heads, width = len(heads[self.ranks.rank]), x.shape[-1]
        sent = torch.cat([x[:, group[0] : group[-1] + 1].reshape(-1, width) for group in heads])
        counts = [self.each * len(group) for group in heads]
        received = exchange(sent, counts, [self.each * local_heads] * self.ranks.size, self.ranks.group)
        return received.view(-1, local_heads, width)[: self.tokens]

    def _to_tokens(
        self, y: Float[Tensor, "T local_heads D"], heads: Sequence[Sequence[int]]
    ) -> Float[Tensor, "each heads D"]:
        """The inverse of `_to_heads`."""
        local_heads, width = len(heads[self.ranks.rank]), y.shape[-1]
        sent = F.pad(y, (0, 0, 0, 0, 0, self.ranks.size * self.each - self.tokens)).reshape(-1, width)
        counts = [self.each * len(group) for group in heads]
        received = exchange(sent, [self.each * local_heads] * self.ranks.size, counts, self.ranks.group)
        parts = zip(received.split(counts), heads, strict=True)
        return torch.cat([part.view(self.each, len(group), width) for part, group in parts], dim=1)


@cache
def _index(indices: tuple[int, ...], device: torch.device) -> Tensor:
    """The indices on `device`. Cached: the host waits for the copy of a list."""
    return torch.tensor(indices, device=device)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, run: Run) -> Tensor:
        ctx.run, padded = run, max(run.counts)
        if not padded:
            return values.clone()
        gathered = values.new_empty(run.ranks.size * padded, *values.shape[1:])
        padding = values.new_zeros(padded - len(values), *values.shape[1:])
        all_gather(gathered, torch.cat([values, padding]), group=run.ranks.group)
        parts = [gathered[rank * padded : rank * padded + count] for rank, count in enumerate(run.counts)]
        return torch.cat(parts).index_select(0, run.order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # FSDP2 averages over these ranks too, but each has only the gradient of its tokens.
        return grad.index_select(0, ctx.run.mine) * ctx.run.ranks.size, None
