"""Context parallelism: ranks that divide the tokens of a pack, and for attention its heads (DeepSpeed-Ulysses, arXiv
2309.14509).

Every layer but attention computes on a run of the pack's tokens. For attention the ranks exchange runs of all heads for
some heads of all tokens, and back; so sequences, shared prompts and branches may lie anywhere, and what attends to
what is decided where it is without this. A rank's memory for activations is 1 / ranks of the pack's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from rlcli.model.attention import Attention
from rlcli.model.device_copies import upload
from rlcli.model.packed_batch import PackedBatch
from rlcli.model.parallel.buckets import all_gather
from rlcli.model.parallel.row_exchange import exchange


@dataclass(frozen=True)
class Heads:
    """Which heads each rank of the group attends with. query, kv: by rank. chosen: of this rank's KV heads, that of
    each of its query heads, or None if they are shared evenly, in order.

    Query heads are divided as evenly as possible. A KV head goes to every rank that has one of its query heads.

    >>> Heads.of(queries=6, kvs=2, ranks=4, rank=1)
    Heads(query=((0, 1), (2, 3), (4,), (5,)), kv=((0,), (0, 1), (1,), (1,)), chosen=None)
    >>> Heads.of(queries=6, kvs=2, ranks=2, rank=0).chosen is None
    True
    >>> Heads.of(queries=5, kvs=5, ranks=2, rank=0).kv
    ((0, 1, 2), (3, 4))
    """

    query: tuple[tuple[int, ...], ...]
    kv: tuple[tuple[int, ...], ...]
    chosen: tuple[int, ...] | None

    @classmethod
    def of(cls, queries: int, kvs: int, ranks: int, rank: int) -> Heads:
        each, more = divmod(queries, ranks)
        assert each, "the rules check that each rank has a head"
        query, kv, start = [], [], 0
        for place in range(ranks):
            own = range(start, start + each + (place < more))
            query.append(tuple(own))
            kv.append(tuple(sorted({head * kvs // queries for head in own})))
            start = own.stop
        places = tuple(kv[rank].index(head * kvs // queries) for head in query[rank])
        share, left = divmod(len(query[rank]), len(kv[rank]))
        even = not left and places == tuple(place // share for place in range(len(places)))
        return cls(tuple(query), tuple(kv), None if even else places)


class ContextGroup:
    """The ranks among which the tokens of a part of the rows are divided; group: theirs."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def run_of(self, batch: PackedBatch) -> Run:
        """This rank's run of a pack that all ranks of the group have."""
        each = -(-batch.tokens // self.size)
        start, missing = self.rank * each, self.size * each - batch.tokens
        owner = batch.places // each
        by_rank = np.argsort(owner, kind="stable")
        order = np.empty_like(by_rank)
        order[by_rank] = np.arange(len(owner))
        indexes = [torch.from_numpy(values) for values in (np.flatnonzero(owner == self.rank), order)]
        mine, in_order = upload(indexes, batch.targets.device)

        def part(values: Tensor, padding: int = 0) -> Tensor:
            behind = [0, 0] * (values.ndim - 1) + [0, missing]
            return F.pad(values, behind, value=padding)[start : start + each]

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
    """The tokens of a pack that one rank computes: equally many on each, the last of them padding, which attends to
    nothing. Implements `rlcli.model.attention.Divided`.

    tokens: of the pack. each: of a run. input_ids, position_ids [each], routes [each, …]: as in the pack. mine int64:
    the response tokens that this rank predicts. response_index, targets, candidates: of those, as in the pack, but from
    the run's start. order [R]: the place of each of the pack's response tokens among those of all ranks, rank after
    rank. counts: of each rank.
    """

    ranks: ContextGroup
    tokens: int
    each: int
    input_ids: Tensor
    position_ids: Tensor
    mine: Tensor
    response_index: Tensor
    targets: Tensor
    candidates: Tensor | None
    order: Tensor
    counts: tuple[int, ...]
    routes: Tensor | None = None

    def gather(self, values: Tensor) -> Tensor:
        """`[R, …]` of each rank's values for the response tokens that it predicts. Collective, and so is the backward
        pass, in which each rank is to have the same gradient: that of the one loss, which all of them compute."""
        gathered: Tensor = _Gather.apply(values, self)
        return gathered

    def attend(
        self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """As `Divided.attend`. Collective."""
        heads = Heads.of(query.shape[1], key.shape[1], self.ranks.size, self.ranks.rank)
        query = self._to_heads(query, heads.query)
        key, value = (self._to_heads(x, heads.kv) for x in (key, value))
        if heads.chosen is not None:
            chosen = _index(heads.chosen, key.device)
            key, value = (x.index_select(1, chosen) for x in (key, value))
        own = heads.query[self.ranks.rank]  # they are neighbours
        beside = () if sinks is None else (sinks[own[0] : own[-1] + 1],)
        return self._to_tokens(attention(query, key, value, *beside), heads.query)

    def _to_heads(self, x: Tensor, heads: Sequence[Sequence[int]]) -> Tensor:
        """`[T, own heads, D]`, of all tokens, of `[each, H, D]`, of a run. heads: those of each rank."""
        mine, width = len(heads[self.ranks.rank]), x.shape[-1]
        sent = torch.cat([x[:, own[0] : own[-1] + 1].reshape(-1, width) for own in heads])  # they are neighbours
        counts = [self.each * len(own) for own in heads]
        found: Tensor = exchange(sent, counts, [self.each * mine] * self.ranks.size, self.ranks.group)
        return found.view(-1, mine, width)[: self.tokens]

    def _to_tokens(self, y: Tensor, heads: Sequence[Sequence[int]]) -> Tensor:
        """`[each, H, D]` of `[T, own heads, D]`: the way back."""
        mine, width = len(heads[self.ranks.rank]), y.shape[-1]
        whole = F.pad(y, (0, 0, 0, 0, 0, self.ranks.size * self.each - self.tokens)).reshape(-1, width)
        counts = [self.each * len(own) for own in heads]
        found = exchange(whole, [self.each * mine] * self.ranks.size, counts, self.ranks.group)
        parts = zip(found.split(counts), heads, strict=True)
        return torch.cat([part.view(self.each, len(own), width) for part, own in parts], dim=1)


@cache
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once: the host waits for a list that is copied to the device."""
    return torch.tensor(places, device=device)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, run: Run) -> Tensor:
        ctx.run, most = run, max(run.counts)
        if not most:
            return values.clone()
        found = values.new_empty(run.ranks.size * most, *values.shape[1:])
        padding = values.new_zeros(most - len(values), *values.shape[1:])
        all_gather(found, torch.cat([values, padding]), group=run.ranks.group)
        parts = [found[rank * most : rank * most + count] for rank, count in enumerate(run.counts)]
        return torch.cat(parts).index_select(0, run.order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # FSDP2 averages over these ranks too, each of which has only its own tokens' part of the one loss.
        return grad.index_select(0, ctx.run.mine) * ctx.run.ranks.size, None
