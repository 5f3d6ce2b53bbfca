"""Samples generated ahead: with which weights, when, what becomes of a failure, and how a checkpoint keeps them."""

from __future__ import annotations

import json
import threading
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from rlcli.data.columns import Samples
from rlcli.data.messages import Collected
from rlcli.errors import RunFailed
from rlcli.launch.launch import build
from rlcli.orchestrator.prefetch import Prefetcher
from rlcli.types import Outcome, Sample, Verdict


class Source:
    """Generates with the weights of `version`, once `may` is set; fails at the steps `failing`."""

    prompts = cursor = waiting = None

    def __init__(self, failing: set[int] | None = None) -> None:
        self.version, self.failing = 0, failing or set()
        self.may = threading.Event()
        self.may.set()
        self.begun: list[tuple[int, str]] = []

    def take(self, step: int) -> Collected:
        self.begun.append((step, threading.current_thread().name))
        version = self.version
        assert self.may.wait(30)
        assert version == self.version, "weights changed within a generation"
        if step in self.failing:
            raise RunFailed(f"step {step} failed")
        return batch(version)


def batch(version: int, verdict: Verdict | None = None) -> Collected:
    verdict = verdict or Verdict(1.0, Outcome.OK)
    samples = Samples.of(Sample(i // 2, i, i % 2, i, 3, 4 + i, "length", verdict, version) for i in range(4))
    return Collected(samples, ["one", "two"], 0.5, 0.25, rounds=1, generated=4, part_weights={"form": 0.5})


def ahead_of(source: Source, staleness: int = 1, last: int = 9) -> tuple[Prefetcher, list[str]]:
    killed: list[str] = []

    def kill() -> None:
        killed.append("engines")
        source.may.set()

    return Prefetcher(source, staleness, last, kill), killed  # type: ignore[arg-type]


def trained(source: Source, ahead: Prefetcher, step: int) -> Collected:
    """One step: take, train, wait, hand the new weights over."""
    found = ahead.take(step)
    ahead.wait()
    source.version = step
    return found


def test_samples_are_one_update_old_from_the_second_step_on() -> None:
    source = Source()
    ahead, _ = ahead_of(source)
    versions = [int(trained(source, ahead, step).samples.version[0]) for step in (1, 2, 3, 4)]
    # Step n starts with the weights of n − 1 updates.
    assert versions == [0, 0, 1, 2]


def test_without_staleness_every_step_has_the_newest_weights_and_no_thread() -> None:
    source = Source()
    ahead, _ = ahead_of(source, staleness=0)
    versions = [int(trained(source, ahead, step).samples.version[0]) for step in (1, 2, 3)]
    assert versions == [0, 1, 2]
    assert source.begun == [(1, "MainThread"), (2, "MainThread"), (3, "MainThread")]
    assert ahead.state() == (None, [])


def test_the_next_step_is_generated_while_this_one_is_trained_on_and_once() -> None:
    source = Source()
    ahead, killed = ahead_of(source, last=3)
    ahead.take(1)
    source.may.clear()
    ahead.wait()
    ahead.take(2)  # its samples are there; those of step 3 wait for `may`
    assert not ahead.waited_for, "the step's phase is another"
    assert source.begun == [(1, "MainThread"), (2, "ahead"), (3, "ahead")]
    source.may.set()
    ahead.wait()
    assert ahead.waited_for
    ahead.take(3)
    ahead.wait()
    assert [step for step, _ in source.begun] == [1, 2, 3], "nothing is generated beyond the last step"
    ahead.close()
    assert killed == []


def test_what_fails_in_the_background_is_raised_where_it_is_waited_for() -> None:
    source = Source(failing={2})
    ahead, _ = ahead_of(source)
    assert len(ahead.take(1).samples) == 4
    for wait in (ahead.wait, ahead.wait, lambda: ahead.take(2)):
        with pytest.raises(RunFailed, match="step 2 failed"):
            wait()


def test_a_failing_run_stops_generation_and_waits_for_its_thread() -> None:
    source = Source()
    ahead, killed = ahead_of(source)
    ahead.take(1)
    ahead.wait()
    source.may.clear()
    ahead.take(2)
    ahead.close()
    assert killed == ["engines"]
    ahead.wait()  # the thread is done


def test_what_is_dropped_is_generated_anew() -> None:
    source = Source()
    ahead, _ = ahead_of(source)
    ahead.take(1)
    ahead.wait()
    ahead.drop()
    source.version = 7
    assert int(ahead.take(1).samples.version[0]) == 7


def test_a_checkpoint_keeps_what_was_generated_ahead_to_the_bit() -> None:
    verdict = Verdict(0.1 + 0.2, Outcome.WRONG, answer="7", parts={"form": 1 / 3}, detail="a «b»", latency_s=0.125)
    source = Source()
    made = batch(3, verdict)
    without = Sample(2, 0, 1, 9, 3, 5, "stop", Verdict(0.0, Outcome.NO_ANSWER), 3)  # no parts, no answer
    rewarded = replace(without, sample=1, row=10, turn_rewards=(0.1, 1 / 3), turn_states=(2**63 - 1, 5))
    made = Collected(
        Samples.joined([made.samples, Samples.of([without, rewarded])]),
        made.shards,
        0.5,
        0.25,
        {1: verdict},
        generated=5,
    )
    source.take = lambda step: made  # type: ignore[method-assign]
    ahead, _ = ahead_of(source)
    ahead.take(4)
    ahead.wait()
    plain, shards = ahead.state()
    assert (plain or {})["step"] == 5
    assert shards == ["one", "two"]

    after, _ = ahead_of(Source(failing={5}))
    after.restore(json.loads(json.dumps(plain)), ["of a group that waits", "read", "back"])
    found = after.take(5)
    assert found.shards == ["read", "back"]
    assert found.baselines == {1: verdict}
    for column in fields(Samples):
        assert_same(getattr(found.samples, column.name), getattr(made.samples, column.name))
    for number in ("generate_s", "verify_s", "rounds", "generated", "part_weights"):
        assert getattr(found, number) == getattr(made, number)
    assert list(found.samples) == list(made.samples)

    columns = (plain or {})["samples"]
    for name in ("seed", "signature", "context_tokens", "turns", "newer_by"):  # checkpoints once lacked them
        del columns[name]
    del columns["turn_rewards"], columns["turn_states"]
    columns["response_tokens"] = columns.pop("drawn_tokens")
    after.restore(plain, ["read", "back"])
    assert list(after.take(5).samples) == [replace(s, turn_rewards=(), turn_states=()) for s in made.samples]


def assert_same(found: Any, made: Any) -> None:
    if isinstance(made, dict):
        assert found.keys() == made.keys()
        for name in made:
            assert_same(found[name], made[name])
        return
    assert found.dtype == made.dtype
    np.testing.assert_array_equal(found, made)


def test_nothing_is_restored_of_a_checkpoint_without() -> None:
    source = Source()
    ahead, _ = ahead_of(source)
    ahead.take(1)
    ahead.wait()
    ahead.restore(None, [])
    assert ahead.step == 0
    assert ahead.state() == (None, [])


class Group:
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
