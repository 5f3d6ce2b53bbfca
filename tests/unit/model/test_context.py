"""The heads and tokens of each rank of a context, without processes, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlcli.model.packed import pack
from rlcli.model.parallel.context_parallel import ContextGroup, Heads
from tests.model_fixtures import ragged_rows
from tests.pretend_gpu import DEVICE, OnGpu, PretendGpu


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("queries", "kvs"), [(4, 4), (4, 2), (6, 2), (6, 3), (12, 4), (5, 5), (8, 1)])
def test_each_query_head_is_on_one_rank_beside_its_kv_head(queries: int, kvs: int, ranks: int) -> None:
    seen: list[int] = []
    for rank in range(ranks):
        heads = Heads.of(queries, kvs, ranks, rank)
        query_heads, kv_heads = heads.query[rank], heads.kv[rank]
        assert abs(len(query_heads) - queries / ranks) < 1
        wanted = [query // (queries // kvs) for query in query_heads]
        assert sorted(set(wanted)) == list(kv_heads), "and no other is sent"
        if heads.kv_of_query is None:  # as grouped attention pairs them
            share = len(query_heads) // len(kv_heads)
            assert wanted == [kv_heads[index // share] for index in range(len(query_heads))]
        else:
            assert wanted == [kv_heads[index] for index in heads.kv_of_query]
        seen += query_heads
    assert seen == list(range(queries))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_runs_of_a_pack_have_its_tokens_and_the_host_waits_for_none(ranks: int) -> None:
    groups = [object.__new__(ContextGroup) for _ in range(ranks)]
    for rank, group in enumerate(groups):
        group.size, group.rank = ranks, rank
    full = pack(ragged_rows(), torch.device("cpu"))
    with PretendGpu() as gpu:
        batch = pack(ragged_rows(), DEVICE)
        runs = [group.run_of(batch) for group in groups]
        assert not gpu.waits
    owner = full.response_index.numpy() // runs[0].each
    for rank, run in enumerate(runs):
        expected = {
            "mine": np.flatnonzero(owner == rank),
            "response_index": full.response_index.numpy()[owner == rank] - rank * run.each,
            "targets": full.targets.numpy()[owner == rank],
        }
        for name, values in expected.items():
            tensor = getattr(run, name)
            assert isinstance(tensor, OnGpu)
            assert tensor.host.tolist() == values.tolist()
        assert run.counts == tuple(np.bincount(owner, minlength=ranks).tolist())
    joined = torch.cat([run.targets.host for run in runs])  # type: ignore[attr-defined]
    for run in runs:
        assert isinstance(run.order, OnGpu)
        assert torch.equal(joined[run.order.host], full.targets)
