"""Which heads and tokens each rank of a context has: without processes, against plain loops."""

from __future__ import annotations

import pytest

from rlcli.model.parallel.context import Heads


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("queries", "kvs"), [(4, 4), (4, 2), (6, 2), (6, 3), (12, 4), (5, 5), (8, 1)])
def test_each_query_head_is_on_one_rank_beside_its_kv_head(queries: int, kvs: int, ranks: int) -> None:
    seen: list[int] = []
    for rank in range(ranks):
        heads = Heads.of(queries, kvs, ranks, rank)
        own, beside = heads.query[rank], heads.kv[rank]
        assert abs(len(own) - queries / ranks) < 1
        wanted = [query // (queries // kvs) for query in own]
        assert sorted(set(wanted)) == list(beside), "and no other is sent"
        if heads.chosen is None:  # as grouped attention pairs them
            share = len(own) // len(beside)
            assert wanted == [beside[place // share] for place in range(len(own))]
        else:
            assert wanted == [beside[place] for place in heads.chosen]
        seen += own
    assert seen == list(range(queries))
