"""The controller's part of the log-prob check: what it asks for, what it keeps, and what it does about a failure."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rlcli.algorithms.correction.log_prob_check import LogProbComparison, sample_table
from rlcli.errors import RunFailed
from rlcli.training.loop.checks.log_prob_check import CALIBRATE_EVERY, NOISE_TOKENS, PROBE_TOKENS, LogProbCheck
from tests.groups import CalledByName

NOISE, UNIT = 0.02, 2.0**-8


class Workers(CalledByName):
    """A group of trainers, and of two engines. Log-probs are −1, and noise on them.

    scale: the trainers' logits, so that their log-probs have a slope. calls: the methods called, in order.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.random = np.random.default_rng(0)
        self.samples = 0
        self.factor = 1.0
        self.broken = False

    def log_probs(self, rows: list[Any]) -> list[Any]:
        return [
            np.linspace(-0.5, -3.0, len(tokens) - prompt) + NOISE * self.random.standard_normal(len(tokens) - prompt)
            for tokens, prompt in rows
        ]

    def compared(self) -> LogProbComparison:
        lengths = np.full(self.samples, 20)
        true = self.random.uniform(-4.0, -0.1, int(lengths.sum()))
        mine = self.factor * true + NOISE * self.random.standard_normal(len(true))
        other = true + NOISE * self.random.standard_normal(len(true))
        if self.broken:
            other[:1] = np.nan
        return LogProbComparison.of(sample_table(mine, other, lengths, sampled=False))

    def recent_rows(self, tokens: int) -> list[tuple[Any, int]]:
        assert tokens == NOISE_TOKENS
        return [(np.arange(30), 10)] * 12 if self.samples else []

    def trainer_log_probs(self, rows: list[Any], unit: float = 0.0, seed: int = 0) -> list[Any]:
        assert unit in (0.0, UNIT)
        self.calls.append("noise" if unit else "trainer")
        return [self.factor * row for row in self.log_probs(rows)]

    def engine_log_probs(self, rows: list[Any]) -> list[list[Any]]:
        self.calls.append("engine")
        return [self.log_probs(rows), self.log_probs(rows)]

    def step(self, check: LogProbCheck, number: int) -> dict[str, float]:
        self.calls.clear()
        check.prepare(number, 20.0 * self.samples)
        return check.check(number, [self.compared(), None])


@pytest.fixture
def workers() -> Workers:
    return Workers()


def check_of(workers: Any, mode: Any = "stop", warned: list[tuple[int, str]] | None = None) -> LogProbCheck:
    warned = [] if warned is None else warned
    prompts = [(np.arange(40), 1)] * 4
    return LogProbCheck(mode, UNIT, prompts, 25, workers, workers, lambda *event: warned.append(event))


def test_own_samples_are_compared_and_only_noise_is_measured_besides(workers: Workers) -> None:
    check = check_of(workers)
    workers.samples = 64
    metrics = workers.step(check, 1)
    assert workers.calls == ["trainer", "noise"]
    assert metrics["log_prob_check/tokens"] == 64 * 20
    assert metrics["log_prob_check/mean_abs_diff"] == pytest.approx(NOISE * 2 / np.pi**0.5, rel=0.1)
    assert 0.5 < metrics["log_prob_check/margin"] < 1.0
    assert metrics["log_prob_check/max_abs_diff"] > 3 * metrics["log_prob_check/mean_abs_diff"]
    for number in range(2, CALIBRATE_EVERY):
        workers.step(check, number)
        assert workers.calls == (["trainer", "noise"] if number == 2 else [])
    workers.step(check, CALIBRATE_EVERY)
    assert workers.calls == ["trainer", "noise"]


def test_few_tokens_are_supplemented_by_a_probe(workers: Workers) -> None:
    check = check_of(workers)
    workers.samples = 2
    metrics = workers.step(check, 3)
    assert workers.calls == ["trainer", "noise", "engine"], "nothing is known of the noise before"
    probed = PROBE_TOKENS // 25
    assert metrics["log_prob_check/tokens"] == 2 * 20 + probed * 15, "rows are cut to what the engine can score"
    supplemented = workers.step(check, 4)
    assert workers.calls == []
    assert supplemented["log_prob_check/tokens"] == 2 * 20
    workers.samples = 0
    without_tokens = workers.step(check, 5)
    assert without_tokens["log_prob_check/slope"] == supplemented["log_prob_check/slope"], (
        "without tokens nothing is forgotten"
    )
    workers.samples = 2
    workers.step(check, 6)
    assert workers.calls == ["trainer", "engine"]


def test_the_first_sync_is_probed_with_prompts_and_not_remembered(workers: Workers) -> None:
    check = check_of(workers)
    initial_state = check.state()
    check.prepare(0, 0.0, counts=False)
    assert workers.calls == ["trainer", "noise"], "the engine has not the weights yet"
    metrics = check.check(0, [], counts=False)
    assert workers.calls == ["trainer", "noise", "engine"]
    assert metrics["log_prob_check/tokens"] == 4 * 24
    assert check.state() == initial_state
    workers.factor = 1.5
    check.prepare(0, 0.0, counts=False)
    with pytest.raises(RunFailed, match=r"log_prob_check/noise = \S+ is beyond its bound"):
        check.check(0, [], counts=False)


def test_a_failed_check_names_statistic_value_bound_and_cause(workers: Workers) -> None:
    workers.samples, workers.factor = 64, 1.1
    with pytest.raises(RunFailed, match=r"slope = 0\.\d+ is beyond its bound, 0\.\d+.*usual cause: the temperature"):
        workers.step(check_of(workers), 1)
    warned: list[tuple[int, str]] = []
    metrics = workers.step(check_of(workers, "warn", warned), 1)
    assert [step for step, _ in warned] == [1]
    assert metrics["log_prob_check/slope"] == pytest.approx(0.1, abs=0.02)


def test_log_probs_that_are_no_numbers_stop_the_run(workers: Workers) -> None:
    workers.samples, workers.broken = 64, True
    with pytest.raises(RunFailed, match="nonfinite = 1 is beyond its bound, 0;"):
        workers.step(check_of(workers), 1)


def test_nothing_is_asked_if_the_check_is_off(workers: Workers) -> None:
    workers.samples = 64
    assert workers.step(check_of(workers, "off"), 1) == {}
    assert workers.calls == []


def test_a_restored_check_continues_as_it_was(workers: Workers) -> None:
    workers.samples = 64
    check = check_of(workers)
    workers.step(check, 1)
    restored = check_of(workers)
    restored.restore(json.loads(json.dumps(check.state())))
    workers.random = np.random.default_rng(5)
    expected = workers.step(check, 3)
    workers.random = np.random.default_rng(5)
    assert workers.step(restored, 3) == expected
