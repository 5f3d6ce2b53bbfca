"""When a worker is busy with which call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlcli.cluster.process import busy_lanes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [10.0]
    monkeypatch.setattr("rlcli.cluster.process.busy_lanes.time.time", lambda: now[0])
    busy_lanes.collect()
    yield now
    busy_lanes.collect()


def test_the_outermost_call_counts_under_the_name_of_its_phase(clock: list[float]) -> None:
    with busy_lanes.busy("sync_weights"):
        clock[0] += 1
        with busy_lanes.busy("probe_log_probs"):
            clock[0] += 1
    with busy_lanes.busy("texts"):
        clock[0] += busy_lanes.SHORTEST_S / 2  # too short
    with busy_lanes.busy("busy_spans"):
        clock[0] += 1
    assert busy_lanes.collect() == [("sync", 10.0, 12.0), ("busy_spans", clock[0] - 1, clock[0])]
    assert busy_lanes.collect() == []


def test_a_call_may_go_on_as_another_phase_also_if_it_fails(clock: list[float]) -> None:
    busy_lanes.rename_current("verify")  # outside any call

    def fails() -> None:
        with busy_lanes.busy("rollout"):
            clock[0] += 1
            busy_lanes.rename_current("verify")
            clock[0] += 2
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert busy_lanes.collect() == [("generate", 10.0, 11.0), ("verify", 11.0, 13.0)]


def test_only_the_newest_calls_are_kept(clock: list[float]) -> None:
    for _ in range(busy_lanes.MOST_SPANS + 5):
        with busy_lanes.busy("update"):
            clock[0] += 1
    spans = busy_lanes.collect()
    assert len(spans) == busy_lanes.MOST_SPANS
    assert spans[-1][2] == clock[0]
