"""Counters of generation add up over workers and over rounds as each is declared."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.data.rollout_stats import COUNTERS, RolloutStats

SAVED = [
    *("count", "groups", "generated", "counting", "score", "asked", "tokens", "dropped", "too_old", "aborted"),
    *("carried", "redrawn", "drafted", "accepted", "version", "generate_s", "verify_s", "idle_s"),
]
"""Keys in the checkpoints that exist."""


@st.composite
def counted(draw: Any) -> RolloutStats:
    seconds, number = st.floats(0, 100), st.integers(0, 99)
    return RolloutStats(
        **{name: draw(seconds if name.endswith("_s") or name == "score" else number) for name in COUNTERS}
    )


@given(st.lists(counted(), min_size=1, max_size=4))
def test_a_round_lasts_as_long_as_its_slowest_worker(workers: list[RolloutStats]) -> None:
    round_stats = RolloutStats.of_round(workers)
    longest = max(stats.generate_s + stats.verify_s for stats in workers)
    assert round_stats.generate_s + round_stats.verify_s == longest
    waited = [longest - stats.generate_s - stats.verify_s for stats in workers]
    assert round_stats.idle_s == pytest.approx(sum(waited) / len(workers), abs=1e-9)
    assert (round_stats.rounds, round_stats.version) == (1, max(stats.version for stats in workers))
    assert round_stats.generated_tokens == sum(stats.generated_tokens for stats in workers)
    assert round_stats.drafted == sum(stats.drafted for stats in workers)


@given(counted(), counted())
def test_rounds_add_up_but_for_what_the_last_one_says(first: RolloutStats, second: RolloutStats) -> None:
    total = first + second
    latest = {"aborted", "version"}
    for name in COUNTERS:
        first_value, second_value = getattr(first, name), getattr(second, name)
        assert getattr(total, name) == (second_value if name in latest else first_value + second_value), name


@given(counted())
def test_a_checkpoint_has_the_counters_of_its_rounds(stats: RolloutStats) -> None:
    state = stats.state()
    assert list(state) == SAVED
    restored = RolloutStats.restored(json.loads(json.dumps(state)))
    assert restored.state() == state
    assert (restored.carried_over, restored.in_flight, restored.stale) == (0, 0, 0)


def test_metrics_follow_from_the_declarations() -> None:
    metrics = RolloutStats(rounds=2, generated=4, counting=2, score=1.0, resumed=3, idle_s=0.5).metrics()
    assert metrics["rollout/rounds"] == 2.0
    assert metrics["rollout/resumed"] == 3.0
    assert metrics["time/idle_s"] == 0.5
    assert metrics["reward/generated"] == 0.5
    assert metrics["rollout/dropped_groups"] == 0.0
    assert not metrics.keys() & {"rollout/drafted", "rollout/drafts_accepted", "throughput/rollout_tokens_per_s"}
    speculated = RolloutStats(drafted=8, accepted=2, generated_tokens=30, generate_s=2.0).metrics()
    assert (speculated["rollout/drafted"], speculated["rollout/drafts_accepted"]) == (8.0, 0.25)
    assert speculated["throughput/rollout_tokens_per_s"] == 15.0
    assert "reward/generated" not in speculated
