"""Generation beside training: when it runs, what becomes of a failure, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlcli.data.columns import SampleTable
from rlcli.data.messages import RolloutBatch
from rlcli.data.rollout_stats import RolloutStats
from rlcli.errors import RunFailed
from rlcli.launch.launch import build
from rlcli.rollout.scheduler.prefetch import Prefetcher
from tests.groups import CalledByName


class Source:
    """Generates beside a step once `may` is set, until it is over if it `lasts`; fails beside the steps `failing`."""

    prompts = cursor = None
    begun = False

    def __init__(self, failing: set[int] | None = None, lasts: bool = False) -> None:
        self.failing, self.lasts = failing or set(), lasts
        self.may = threading.Event()
        self.may.set()
        self.calls: list[tuple[str, int, str]] = []
        self.dropped = 0

    def take(self, step: int) -> RolloutBatch:
        self.calls.append(("take", step, threading.current_thread().name))
        return RolloutBatch(SampleTable.of([]), stats=RolloutStats(generate_s=0.5, verify_s=0.25))

    def prefetch(self, step: int, should_stop: Callable[[], bool]) -> None:
        self.calls.append(("ahead", step, threading.current_thread().name))
        assert self.may.wait(30)
        while self.lasts and not should_stop():
            pass
        if step in self.failing:
            raise RunFailed(f"step {step} failed")

    def discard(self) -> None:
        self.dropped += 1


def ahead_of(source: Source, concurrent: bool = True, last: int = 9) -> tuple[Prefetcher, list[str]]:
    killed: list[str] = []

    def kill() -> None:
        killed.append("engines")
        source.may.set()

    typed_source: Any = source
    return Prefetcher(typed_source, concurrent, last, kill), killed


def test_the_engines_generate_beside_each_step_but_the_last() -> None:
    source = Source()
    prefetcher, killed = ahead_of(source, last=3)
    for step in (1, 2, 3):
        prefetcher.take(step)
        assert prefetcher.waited_for == (step == 3)
        prefetcher.wait()
        assert prefetcher.waited_for
    steps = [("take", 1), ("ahead", 1), ("take", 2), ("ahead", 2), ("take", 3)]
    assert [(call, step) for call, step, _ in source.calls] == steps
    assert {(call, thread) for call, _, thread in source.calls} == {("take", "MainThread"), ("ahead", "background")}
    prefetcher.close()
    assert killed == []


def test_where_nothing_is_generated_beside_training_there_is_no_thread() -> None:
    source = Source()
    prefetcher, _ = ahead_of(source, concurrent=False)
    for step in (1, 2, 3):
        prefetcher.take(step)
    prefetcher.wait()
    assert [call for call, _, _ in source.calls] == ["take"] * 3


def test_generation_goes_on_until_the_engines_are_needed() -> None:
    source = Source(lasts=True)
    prefetcher, _ = ahead_of(source)
    prefetcher.take(1)
    prefetcher.wait()
    assert prefetcher.busy_s > 0
    prefetcher.take(2)
    prefetcher.wait()
    assert [call for call, _, _ in source.calls] == ["take", "ahead"] * 2


def test_what_fails_in_the_background_is_raised_where_it_is_waited_for() -> None:
    source = Source(failing={1})
    prefetcher, _ = ahead_of(source)
    prefetcher.take(1)
    for wait in (prefetcher.wait, prefetcher.wait, lambda: prefetcher.take(2), prefetcher.discard):
        with pytest.raises(RunFailed, match="step 1 failed"):
            wait()


def test_a_failing_run_stops_generation_and_waits_for_its_thread() -> None:
    source = Source()
    prefetcher, killed = ahead_of(source)
    source.may.clear()
    prefetcher.take(1)
    prefetcher.close()
    assert killed == ["engines"]
    prefetcher.wait()  # the thread is done


def test_what_is_dropped_is_not_generated_meanwhile() -> None:
    source = Source(lasts=True)
    prefetcher, _ = ahead_of(source)
    prefetcher.take(1)
    prefetcher.discard()
    assert source.dropped == 1


class Group(CalledByName):
    """Builds once `may` is set; fails where it is `broken`."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.may, self.began = broken, threading.Event(), threading.Event()
        self.killed = False

    def build(self) -> None:
        self.began.set()
        assert self.may.wait(30)
        if self.broken or self.killed:
            raise RunFailed(self.broken or "killed")

    def kill(self) -> None:
        self.killed = True
        self.may.set()


def test_groups_are_built_at_the_same_time() -> None:
    class First(Group):
        def build(self) -> None:
            assert engines.began.wait(30)
            engines.may.set()

    groups = [First(), engines := Group()]
    build(groups)  # type: ignore[arg-type]
    assert not any(group.killed for group in groups)


@pytest.mark.parametrize("at_fault", [0, 1])
def test_where_one_group_cannot_be_built_the_others_end_with_its_error(at_fault: int) -> None:
    groups = [Group(), Group(), Group()]
    groups[at_fault].broken = "no such model"
    groups[at_fault].may.set()
    if at_fault:
        groups[0].may.set()
    with pytest.raises(RunFailed, match="no such model"):
        build(groups)  # type: ignore[arg-type]
    assert all(group.killed for group in groups)
