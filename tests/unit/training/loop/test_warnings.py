"""Each warning is raised by the metrics of its fault, by name, and by nothing else."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from rlcli.model.optim import lr_at
from rlcli.training.loop.warnings import NAMES, REPEAT_EVERY, Warnings, without_signal

DOCUMENT = Path(__file__).parents[4] / "docs" / "checks.md"

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
    "outcome/ok": 0.5,
    "outcome/timeout": 0.0,
    "outcome/crash": 0.0,
    "verify/overran": 0.0,
    "response_tokens/truncated": 0.05,
    "reward/truncated": 0.9,  # of few responses
}


IDLE = {"update/count": 0.0, "update/grad_norm": 0.0}
EQUAL = {"reward/std": 0.0, "reward/equal_groups": 1.0}
"""All rewards of a step are equal."""


class Run:
    """The warnings of a run, and what they reported: (step, name). So many prompts a step, and samples a prompt."""

    def __init__(self, prompts: int = 32, samples: int = 8, *, lr: float = 1e-6, unrewarded: bool = False) -> None:
        self.notes: list[str] = []
        self.events: list[tuple[int, str]] = []
        self.warnings = Warnings(
            0.05, 1.0, self.notes.append, self._event, prompts=prompts, samples=samples, lr=lr, unrewarded=unrewarded
        )
        self.lr, self.step = lr, 0

    def _event(self, kind: str, *, step: int, name: str, text: str) -> None:
        assert kind == "warning"
        assert self.notes[-1] == f"warning {name}: {text}"
        self.events.append((step, name))

    def steps(self, count: int, **changed: Any) -> list[tuple[int, str]]:
        """The events of so many further steps."""
        event_count = len(self.events)
        for _ in range(count):
            self.step += 1
            metrics = SOUND | {"update/lr": self.lr} | changed
            self.warnings.check(self.step, metrics)
            self.warnings.check_sync(self.step, metrics)
        return self.events[event_count:]


def test_a_sound_run_raises_no_warning() -> None:
    assert Run().steps(200) == []


@pytest.mark.parametrize(
    ("metrics", "warns"),
    [
        ({}, True),
        ({"sync/changed_tensors": 1.0}, False),
        ({"update/count": 0.0}, False),
        ({"update/grad_norm": 0.0}, False),
        ({"update/lr": 1e-10}, False),
        ({"update/lr": 0.0}, False),
    ],
)
def test_updates_that_change_nothing_are_warned_of(metrics: dict[str, float], warns: bool) -> None:
    run = Run()
    run.steps(1, **{"update/lr": 1e-6, "sync/changed_tensors": 0.0} | metrics)
    assert run.events == [(1, "weights_unchanged")] * warns


@pytest.mark.parametrize(
    ("name", "at", "fault"),
    [
        ("no_gradient", 3, IDLE),
        ("mismatch", 2, {"mismatch/kl": 0.2}),
        ("constant_reward", 3, {"reward/std": 0.0}),
        ("constant_reward", 4, {"reward/std": 0.0, "reward/mean": 0.0, "outcome/ok": 0.0}),
        ("verifier_failures", 1, {"outcome/timeout": 0.08, "outcome/crash": 0.08}),
        ("verifier_overruns", 1, {"verify/overran": 0.06}),
        ("reference_is_policy", 3, {"update/kl_start": 0.0}),
        ("no_response_ends", 3, {"response_tokens/truncated": 1.0, "reward/truncated": 0.0}),
        ("truncated_rewarded", 3, {"response_tokens/truncated": 0.3}),
        ("mismatch", 2, {"mismatch/k3": 0.2}),
        ("loss_scale", 2, {"update/loss_scale": 1.1}),
        ("loss_scale", 2, {"update/loss_scale": 0.0}),
        ("loss_scale", 2, {"update/loss_scale": -1.0, "update/clip_high": 0.1}),
    ],
)
def test_a_warning_names_its_fault(name: str, at: int, fault: dict[str, float]) -> None:
    run = Run()
    assert run.steps(10, **fault)[:1] == [(at, name)]
    assert {warning for _, warning in run.events} == {name}


def test_every_warning_is_documented() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert set(NAMES) <= set(rows)


def test_a_lasting_fault_is_reported_now_and_then() -> None:
    fault = {"mismatch/kl": 0.2} | IDLE
    assert [step for step, _ in Run().steps(2 * REPEAT_EVERY, **fault)] == [2, 3, 2 + REPEAT_EVERY, 3 + REPEAT_EVERY]


def test_samples_of_an_older_policy_may_differ_from_the_trainer() -> None:
    assert Run().steps(5, **{"mismatch/kl": 0.2, "rollout/staleness": 1.0}) == []


def test_a_mismatch_at_equal_weights_is_told_apart_from_age() -> None:
    aged = {"mismatch/kl": 0.2, "rollout/staleness": 1.0}
    assert Run().steps(5, **aged, **{"log_prob_check/k3": 0.01}) == []
    run = Run()
    assert run.steps(5, **aged, **{"log_prob_check/k3": 0.2}) == [(1, "mismatch")]
    assert "at equal weights: log_prob_check/k3 = 0.2 is above algorithm.mismatch_warning = 0.05" in run.notes[0]


def test_one_step_of_few_tokens_may_look_like_a_mismatch_or_a_wrong_scale() -> None:
    run = Run(prompts=1)
    for _ in range(20):
        assert run.steps(1, **{"mismatch/k3": 0.2, "update/loss_scale": 1.2}) + run.steps(1) == []


def test_a_task_that_is_solved_raises_no_warning() -> None:
    run = Run()
    run.steps(20)
    solved = EQUAL | IDLE | {"reward/mean": 1.0, "outcome/ok": 1.0}
    assert run.steps(200, **solved) == []
    broken = solved | {"reward/mean": 0.0, "outcome/ok": 0.0}
    assert run.steps(10, **broken) == [(224, "constant_reward"), (228, "no_gradient")]  # and then the verifier breaks


def test_given_responses_are_all_right() -> None:
    run = Run(samples=1, unrewarded=True)
    assert run.steps(100, **EQUAL | {"reward/mean": 1.0, "outcome/ok": 1.0, "response_tokens/truncated": 0.0}) == []


def test_a_step_without_a_sample_that_counts_is_no_constant_reward() -> None:
    nothing = {"reward/std": math.nan, "reward/mean": math.nan, "reward/equal_groups": math.nan}
    run = Run()
    assert run.steps(5, **nothing) == []
    assert run.steps(3, **{"reward/std": 0.0}) == [(8, "constant_reward")]


def test_an_idle_step_now_and_then_raises_no_warning() -> None:
    run = Run()
    assert [*run.steps(2, **IDLE), *run.steps(1), *run.steps(2, **IDLE)] == []
    assert run.steps(3, **IDLE) == [(6, "no_gradient")]
    assert "no gradient for 3 steps: rewards are equal in 0% of the groups; reward 0.5" in run.notes[-1]
    run.steps(REPEAT_EVERY, **IDLE | {"mismatch/corrected": 1.0})
    assert "algorithm.correction cuts every token" in run.notes[-1]
    run.steps(1, **IDLE | {"critic/grad_norm": 1.0})  # a critic that learns alone
    assert run.warnings.idle_steps == 0


def test_a_resumed_run_raises_the_warnings_of_one_that_was_not_stopped() -> None:
    for fault in ({"response_tokens/truncated": 1.0, "reward/truncated": 0.0}, {"outcome/timeout": 0.02}, IDLE):
        uninterrupted, first, second = Run(), Run(), Run()
        first_events = uninterrupted.steps(2, **fault)
        expected = first_events + uninterrupted.steps(10, **{"outcome/timeout": 0.2})
        first.steps(2, **fault)
        second.warnings.restore(json.loads(json.dumps(first.warnings.state())))
        second.step = 2
        assert first.events + second.steps(10, **{"outcome/timeout": 0.2}) == expected


def stream(
    rng: random.Random, *, prompts: int, samples: int, right: float, cut: float, failed: float
) -> dict[str, Any]:
    """The metrics of a step: each prompt has its own chance of a right answer, many of which are 0 or 1; a share `cut`
    of the responses is cut off, and wrong but for a tenth; of a share `failed` the verification timed out."""
    chances = [rng.choice([0.0, 1.0, right]) if right not in (0.0, 1.0) else right for _ in range(prompts)]
    groups, truncated, timeouts, rewarded = [], 0, 0, 0.0
    for chance in chances:
        rewards = []
        for _ in range(samples):
            long = rng.random() < cut
            score = float(rng.random() < (0.1 * chance if long else chance))
            truncated, rewarded = truncated + long, rewarded + score * long
            timeouts += rng.random() < failed
            rewards.append(score)
        groups.append(rewards)
    flat = [reward for rewards in groups for reward in rewards]
    mean, n = sum(flat) / len(flat), len(flat)
    equal = sum(len(set(rewards)) == 1 for rewards in groups) / prompts
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(sum((reward - mean) ** 2 for reward in flat) / n),
        "reward/equal_groups": equal,
        "outcome/ok": mean,
        "outcome/timeout": timeouts / n,
        "response_tokens/truncated": truncated / n,
        "reward/truncated": rewarded / truncated if truncated else 0.0,
        "update/count": float(equal < 1.0),
        "update/grad_norm": 0.5 * (equal < 1.0),
        # The engine's precision, and a token now and then that it finds far likelier than the trainer.
        "mismatch/k3": 0.002 + 0.2 * (rng.random() < 0.005),
        "update/loss_scale": rng.uniform(0.97, 1.03),
    }


@pytest.mark.parametrize("prompts", [1, 2, 8, 32])
@pytest.mark.parametrize(
    ("right", "cut", "failed"),
    [
        (0.02, 0.0, 0.0),  # a hard task
        (0.3, 0.5, 0.002),  # half of the responses reach the limit
        (0.5, 0.9, 0.01),  # most do
        (0.7, 0.05, 0.01),
        (1.0, 0.0, 0.0),  # solved: see below
    ],
)
def test_sound_runs_of_any_size_raise_no_warning(prompts: int, right: float, cut: float, failed: float) -> None:
    for seed in range(1 + 8 // prompts):
        rng, run = random.Random(seed), Run(prompts)
        if right == 1.0:
            run.steps(5)  # it was not solved from the start
        for _ in range(200):
            run.steps(1, **stream(rng, prompts=prompts, samples=8, right=right, cut=cut, failed=failed))
        assert run.events == []


def test_a_hard_task_begins_with_rewards_of_zero() -> None:
    """1 of 300 responses is right: its first step may be the fourth."""
    zero, rewarded = (
        EQUAL | IDLE | {"reward/mean": 0.0, "outcome/ok": 0.0},
        {"reward/mean": 1 / 256, "outcome/ok": 1 / 256},
    )
    run = Run()
    for _ in range(20):
        assert run.steps(3, **zero) + run.steps(1, **rewarded) == []


def test_a_few_failures_in_a_small_step_are_not_many() -> None:
    run = Run(prompts=1)
    for _ in range(20):
        assert run.steps(1, **{"outcome/timeout": 1 / 8, "verify/overran": 1 / 8}) + run.steps(4) == []
    assert {name for _, name in run.steps(20, **{"outcome/timeout": 1 / 8})} == {"verifier_failures"}
    run = Run()
    assert run.steps(30) + run.steps(3, **{"outcome/timeout": 0.5})[:1] == [(32, "verifier_failures")]


def test_truncated_responses_with_lower_scores_raise_no_warning() -> None:
    """A verifier whose scores go up to 100, and which gives 1 for the format."""
    run = Run()
    assert run.steps(50, **{"response_tokens/truncated": 0.6, "reward/truncated": 1.0, "reward/mean": 40.0}) == []


@pytest.mark.parametrize(("warmup", "at"), [(0, 3), (20, 10)])
def test_a_reference_that_is_the_policy_shows_once_the_rate_has_risen(warmup: int, at: int) -> None:
    """After a step of a hundredth of the rate, bfloat16 still computes the same log-probs."""
    run = Run()
    for step in range(20):
        rate = lr_at(step, peak=run.lr, steps=100, warmup_steps=warmup, schedule="constant", min_fraction=0.0)
        run.steps(1, **{"update/kl_start": 0.0, "update/lr": rate})
    assert run.events == [(at, "reference_is_policy")]


def test_the_end_of_a_cosine_may_change_nothing() -> None:
    run = Run()
    for step in range(1000):
        rate = lr_at(step, peak=run.lr, steps=1000, warmup_steps=10, schedule="cosine", min_fraction=0.0)
        run.steps(1, **{"update/lr": rate, "sync/changed_tensors": 0.0 if rate < 1e-10 else 290.0})
    assert run.events == []


def test_clipping_in_the_first_update_lowers_the_gradient() -> None:
    """GSPO clips at 3e-4, which bfloat16 alone can reach."""
    assert Run().steps(20, **{"update/loss_scale": 0.8, "update/clip_high": 0.05, "update/clip_low": 0.04}) == []


@pytest.mark.parametrize(
    ("right", "hints"),
    [
        (0.0, ["easier prompts", "rollout.samples_per_prompt = 4", "rlcli verifiers audit"]),
        (0.5, ["always or never solved", "rlcli prep filter", "rollout.samples_per_prompt = 4"]),
        (1.0, ["harder prompts", "rlcli prep filter"]),
    ],
)
def test_a_missing_gradient_says_what_to_do(right: float, hints: list[str]) -> None:
    text = without_signal({"outcome/ok": right}, 4)
    assert all(hint in text for hint in hints)
    notes: list[str] = []
    warnings = Warnings(0.05, 1.0, notes.append, lambda *_, **__: None, prompts=8, samples=4, lr=1e-5)
    warnings.rewards_differed = right != 0.0
    for step in range(1, 101):
        warnings.check(step, SOUND | IDLE | {"outcome/ok": right, "reward/equal_groups": 0.9})
    assert notes
    assert notes[0].startswith("warning no_gradient: no gradient for 3 steps: rewards are equal in 90% of the groups")
    assert text in notes[0]
