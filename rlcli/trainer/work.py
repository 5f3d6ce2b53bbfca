"""From a plan over sample indexes to the rows that each rank fetches."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.data.packer import Plan
from rlcli.trainer.collect import Collected
from rlcli.workers.work import MicroWork, MiniWork, RankWork


def rank_work(plan: Plan, batch: Collected, advantages: Sequence[float], *, ranks: int) -> list[RankWork]:
    """One RankWork for each rank. Only references and indexes: the tokens stay where they are."""
    import numpy as np

    shard = np.asarray([s.shard for s in batch.samples], dtype=np.int64)
    row = np.asarray([s.row for s in batch.samples], dtype=np.int64)
    values = np.asarray(advantages, dtype=np.float32)

    def micro(indexes: Sequence[int]) -> MicroWork:
        chosen = np.asarray(indexes, dtype=np.int64)
        return MicroWork(shard[chosen], row[chosen], values[chosen])

    return [
        RankWork(
            batch.shards,
            [
                MiniWork([micro(indexes) for indexes in mini.ranks[rank]], mini.tokens, mini.sequences, mini.max_length)
                for mini in plan.minibatches
            ],
        )
        for rank in range(ranks)
    ]
