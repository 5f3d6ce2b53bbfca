"""Samples whose log-probs a worker compares: tokens of the current weights, before the first optimizer step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlcli.algorithms.correction.log_prob_check import LogProbComparison, sample_table
from rlcli.data.trajectories import Trajectory
from rlcli.training.worker.log_prob_record import LogProbRecord, sampled_by
from rlcli.training.worker.train_batch import TokenColumns

IDS = np.arange(100, 120, dtype=np.int32)


def trajectory(prompt: int, *turns: tuple[int, int | None]) -> Trajectory:
    """drawn: tokens and their version."""
    result = Trajectory.of_prompt(IDS[:prompt])
    for count, version in turns:
        result = result.extended("policy", IDS[:count], np.full(count, -1.0, np.float32), version, "stop")
    return result


def micro_of(*rows: Trajectory) -> Any:
    engine = torch.tensor(np.concatenate([row.log_probs for row in rows]))
    return SimpleNamespace(empty=False, rows=rows, tokens=TokenColumns(rollout_log_probs=engine))


def assert_equal(actual: LogProbComparison, other: LogProbComparison) -> None:
    np.testing.assert_array_equal(actual.moments.sums, other.moments.sums)
    np.testing.assert_array_equal(actual.moments.products, other.moments.products)
    assert (actual.worst_sample, actual.largest) == (other.worst_sample, other.largest)


def test_only_tokens_of_the_current_weights_are_compared() -> None:
    assert sampled_by(trajectory(2, (3, 6), (2, 7)), 7).tolist() == [False] * 3 + [True] * 2
    assert sampled_by(trajectory(2, (1, None)), 7).tolist() == [False]
    record = LogProbRecord()
    record.begin(version=7)
    record.record(
        micro_of(trajectory(2, (3, 6), (2, 7)), trajectory(1, (4, 6)), trajectory(1, (1, 7))), -torch.arange(10.0)
    )
    assert record.tokens == 3
    table = sample_table(np.array([-3.0, -4.0, -9.0]), np.full(3, -1.0), np.array([2, 0, 1]), sampled=True)
    assert_equal(record.comparison(), LogProbComparison.of(table))
    assert record.comparison().tokens == 0, "each token is compared once"


def test_nothing_is_compared_after_an_optimizer_step() -> None:
    record, first, second = LogProbRecord(), micro_of(trajectory(1, (2, 3))), micro_of(trajectory(1, (4, 3)))
    record.begin(version=3)
    record.record(first, torch.full((2,), -1.0))
    record.record(first, torch.full((2,), -2.0))  # the same update again, with a lower gradient scale
    record.weights_changed()
    record.record(second, torch.full((4,), -1.0))
    assert record.tokens == 0, "later updates compare nothing"
    compared = record.comparison()
    assert (compared.tokens, compared.moments.total("a")) == (2.0, 2.0)
    record.begin(version=4)
    record.record(second, torch.full((4,), -1.0))
    assert record.tokens == record.comparison().tokens == 0, "none of its tokens are of version 4"


def test_a_trainer_that_computes_no_number_is_left_to_the_update_guard() -> None:
    record = LogProbRecord()
    record.begin(version=3)
    record.record(micro_of(trajectory(1, (3, 3))), torch.tensor([-1.0, float("nan"), -1.0]))
    compared = record.comparison()
    assert compared.tokens == 2.0
    assert np.isfinite(compared.moments.products).all()
    assert compared.largest == 0.0


def test_recent_samples_are_whole_branches_of_about_so_many_tokens() -> None:
    record, rows = LogProbRecord(), [trajectory(2, (3, 1)) for _ in range(5)]
    record.remember([trajectory(4), *rows])
    assert [(len(tokens), prompt) for tokens, prompt in record.recent(7)] == [(5, 2)] * 3
    joined = Trajectory.joined([trajectory(2, (3, 1)), trajectory(1, (6, 1))])
    record.remember([joined])
    ((tokens, prompt),) = record.recent(100)
    assert (tokens.tolist(), prompt) == (joined.branch.tolist(), 1)
    record.remember([])
    assert record.recent(100) == [], "none of an earlier step"
