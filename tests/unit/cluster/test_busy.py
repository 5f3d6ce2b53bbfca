"""When a worker is busy with which call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlcli.cluster.process import busy


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [10.0]
    monkeypatch.setattr("rlcli.cluster.process.busy.time.time", lambda: now[0])
    busy.collect()
    yield now
    busy.collect()


def test_the_outermost_call_counts_under_the_name_of_its_phase(clock: list[float]) -> None:
    with busy.busy("sync_weights"):
        clock[0] += 1
        with busy.busy("probe_log_probs"):
            clock[0] += 1
    with busy.busy("texts"):
        clock[0] += busy.SHORTEST_S / 2  # too short
    with busy.busy("busy_spans"):
        clock[0] += 1
    assert busy.collect() == [("sync", 10.0, 12.0), ("busy_spans", clock[0] - 1, clock[0])]
    assert busy.collect() == []


def test_a_call_may_go_on_as_another_phase_also_if_it_fails(clock: list[float]) -> None:
    busy.goes_on_as("verify")  # outside any call

    def fails() -> None:
        with busy.busy("rollout"):
            clock[0] += 1
            busy.goes_on_as("verify")
            clock[0] += 2
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert busy.collect() == [("generate", 10.0, 11.0), ("verify", 11.0, 13.0)]


def test_only_the_newest_calls_are_kept(clock: list[float]) -> None:
    for _ in range(busy.MOST_SPANS + 5):
        with busy.busy("update"):
            clock[0] += 1
    spans = busy.collect()
    assert len(spans) == busy.MOST_SPANS
    assert spans[-1][2] == clock[0]
