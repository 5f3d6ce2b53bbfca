"""Measures that shorten the start-up."""

from __future__ import annotations

import gc

import pytest

from rlcli.cluster.process.startup_times import FEW_COLLECTIONS, few_collections
from rlcli.rollout.vllm.hooks.process_state import uncollected


def test_garbage_is_collected_rarely_until_the_block_ends_however_it_does() -> None:
    threshold = gc.get_threshold()
    with few_collections():
        assert gc.get_threshold() == FEW_COLLECTIONS
    assert gc.get_threshold() == threshold
    with pytest.raises(KeyboardInterrupt), few_collections():
        raise KeyboardInterrupt
    assert gc.get_threshold() == threshold


def test_nothing_is_collected_on_demand_while_an_engine_closes() -> None:
    collect = gc.collect
    runs: list[str] = []
    gc.callbacks.append(lambda phase, info: runs.append(phase))
    try:
        with uncollected():
            gc.collect()
            gc.collect(2)
            assert runs == []
        assert gc.collect is collect
        gc.collect()
        assert runs
    finally:
        gc.callbacks.pop()
