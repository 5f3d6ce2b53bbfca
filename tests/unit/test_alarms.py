"""Each alarm is raised by the metrics of its fault, by name, and by nothing else."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from rlcli.trainer.alarms import NAMES, REPEAT_EVERY, Alarms

DOCUMENT = Path(__file__).parents[2] / "docs" / "checks.md"

SOUND = {
    "update/count": 1.0,
    "update/grad_norm": 0.5,
    "update/kl_start": 0.01,
    "update/loss_scale": 1.0,
    "reward/equal_groups": 0.0,
    "reward/mean": 0.5,
    "reward/std": 0.5,
    "rollout/staleness": 0.0,
    "mismatch/kl": 1e-5,
    "mismatch/k3": 1e-5,
    "outcome/timeout": 0.0,
    "outcome/crash": 0.0,
    "verify/overran": 0.0,
    "response_tokens/truncated": 0.05,
    "reward/truncated": 0.9,  # of few responses
}


class Run:
    """The alarms of a run, and what they reported: (step, name)."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.events: list[tuple[int, str]] = []
        self.alarms = Alarms(0.05, 1.0, self.notes.append, self._event)
        self.step = 0

    def _event(self, kind: str, *, step: int, name: str, text: str) -> None:
        assert kind == "alarm"
        assert self.notes[-1] == f"alarm {name}: {text}"
        self.events.append((step, name))

    def steps(self, count: int, **changed: Any) -> list[tuple[int, str]]:
        """The events of so many further steps."""
        before = len(self.events)
        for _ in range(count):
            self.step += 1
            self.alarms.check(self.step, SOUND | changed)
        return self.events[before:]


def test_a_sound_run_raises_no_alarm() -> None:
    assert Run().steps(200) == []


@pytest.mark.parametrize(
    ("metrics", "warns"),
    [
        ({}, True),
        ({"sync/changed_tensors": 1.0}, False),
        ({"update/count": 0.0}, False),
        ({"update/grad_norm": 0.0}, False),
        ({"update/lr": 0.0}, False),
    ],
)
def test_updates_that_change_nothing_are_warned_of(metrics: dict[str, float], warns: bool) -> None:
    run = Run()
    run.alarms.check_sync(1, SOUND | {"update/lr": 1e-9, "sync/changed_tensors": 0.0} | metrics)
    assert run.events == [(1, "weights_unchanged")] * warns


@pytest.mark.parametrize(
    ("name", "at", "fault"),
    [
        ("no_gradient", 3, {"update/count": 0.0, "update/grad_norm": 0.0}),
        ("mismatch", 1, {"mismatch/kl": 0.2}),
        ("constant_reward", 3, {"reward/std": 0.0}),
        ("verifier_failures", 1, {"outcome/timeout": 0.08, "outcome/crash": 0.08}),
        ("verifier_overruns", 1, {"verify/overran": 0.06}),
        ("reference_is_policy", 3, {"update/kl_start": 0.0}),
        ("no_response_ends", 3, {"response_tokens/truncated": 1.0, "reward/truncated": 0.0}),
        ("truncated_rewarded", 3, {"response_tokens/truncated": 0.3}),
        ("mismatch", 1, {"mismatch/k3": 0.2}),
        ("loss_scale", 1, {"update/loss_scale": 1.1}),
        ("loss_scale", 1, {"update/loss_scale": 0.0}),
    ],
)
def test_an_alarm_names_its_fault(name: str, at: int, fault: dict[str, float]) -> None:
    run = Run()
    assert run.steps(10, **fault)[:1] == [(at, name)]
    assert {found for _, found in run.events} == {name}


def test_other_terms_of_the_loss_may_change_its_scale() -> None:
    run = Run()
    run.alarms = Alarms(0.05, 1.0, run.notes.append, run._event, other_terms=True)
    assert run.steps(3, **{"update/loss_scale": 1.2}) == []
    assert run.steps(1, **{"update/loss_scale": 1.6}) == [(4, "loss_scale")]


def test_every_alarm_is_documented() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert set(NAMES) <= set(rows)


def test_a_lasting_fault_is_reported_now_and_then() -> None:
    assert [step for step, _ in Run().steps(2 * REPEAT_EVERY, **{"mismatch/kl": 0.2})] == [1, 1 + REPEAT_EVERY]


def test_samples_of_an_older_policy_may_differ_from_the_trainer() -> None:
    assert Run().steps(5, **{"mismatch/kl": 0.2, "rollout/staleness": 1.0}) == []


def test_a_task_that_is_solved_raises_no_alarm() -> None:
    run = Run()
    run.steps(20)
    solved = {"reward/std": 0.0, "reward/mean": 1.0, "reward/equal_groups": 1.0}
    assert run.steps(20, **solved) == []
    assert run.steps(3, **solved | {"reward/mean": 0.0}) == [(41, "constant_reward")]  # and then the verifier breaks


def test_a_step_without_a_sample_that_counts_is_no_constant_reward() -> None:
    nothing = {"reward/std": math.nan, "reward/mean": math.nan, "reward/equal_groups": math.nan}
    run = Run()
    assert run.steps(5, **nothing) == []
    assert run.steps(3, **{"reward/std": 0.0}) == [(8, "constant_reward")]


def test_an_idle_step_now_and_then_raises_no_alarm() -> None:
    run, idle = Run(), {"update/count": 0.0}
    assert [*run.steps(2, **idle), *run.steps(1), *run.steps(2, **idle)] == []
    assert run.steps(3, **idle) == [(6, "no_gradient")]
    assert "rewards are equal in 0% of the groups; reward 0.5" in run.notes[-1]
    run.steps(2, **idle | {"mismatch/corrected": 1.0})
    assert "for 6 steps" in run.notes[-1]
    assert "algorithm.correction cuts every token" in run.notes[-1]
    run.steps(1, **idle | {"critic/grad_norm": 1.0})  # a critic that learns alone
    assert run.alarms.idle_steps == 0


def test_a_resumed_run_raises_the_alarms_of_one_that_was_not_stopped() -> None:
    whole, first, second = Run(), Run(), Run()
    fault = {"response_tokens/truncated": 1.0, "reward/truncated": 0.0}
    expected = whole.steps(2, **fault) + whole.steps(2, **fault)
    first.steps(2, **fault)
    second.alarms.restore(first.alarms.state())
    second.step = 2
    assert first.events + second.steps(2, **fault) == expected == [(3, "no_response_ends")]
