"""What crosses between the controller and the workers, without Ray."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from rlcli.config.schema import RunConfig
from rlcli.workers.dispatch import add_up, dispatch, dispatch_of
from rlcli.workers.work import sample_seed
from rlcli.workers.worker import Worker, WorkerSpec


def test_a_seed_names_its_sample_and_nothing_else() -> None:
    seeds = {
        sample_seed(seed, purpose, step, prompt, sample)
        for seed in (0, 1)
        for purpose in ("train", "eval")
        for step in (1, 2, 11)
        for prompt in ("a:train:1", "a:train:11")
        for sample in range(8)
    }
    assert len(seeds) == 2 * 2 * 3 * 2 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, "train", 1, "a", 0) == sample_seed(0, "train", 1, "a", 0)


def test_numbers_of_all_ranks_are_added_key_by_key() -> None:
    assert add_up([{"tokens": 3.0, "kl": 0.5}, {}, {"tokens": 1.0}]) == {"tokens": 4.0, "kl": 0.5}


def test_only_marked_methods_can_be_called_on_a_group() -> None:
    class Some:
        @dispatch(send="scatter", collect="sum")
        def marked(self, rows: list[int]) -> dict[str, float]:
            return {"rows": float(len(rows))}

        def unmarked(self) -> None: ...

    assert dispatch_of(Some, "marked").collect == "sum"
    with pytest.raises(AttributeError, match="@dispatch"):
        dispatch_of(Some, "unmarked")


def test_every_phase_of_the_step_is_dispatched() -> None:
    for name in (
        "rollout",
        "take_shard",
        "load",
        "compute_old_log_probs",
        "compute_reference_log_probs",
        "update",
        "sync_weights",
    ):
        dispatch_of(Worker, name)


@pytest.fixture
def worker(tmp_path: Any) -> Worker:
    """A worker whose roles are stand-ins. (Its constructor would take this process's output.)"""
    made = object.__new__(Worker)
    made.config = RunConfig()
    made.spec = WorkerSpec(
        made.config,
        "cpu",
        "float32",
        frozenset({"policy", "engine"}),
        "",
        str(tmp_path),
        "rank",
        8,
        None,
        1,
        (),
        "test",
    )
    made.policy, made.rollout_role, made.batch = MagicMock(), MagicMock(version=0), None
    return made


@pytest.mark.filterwarnings("ignore:invalid value")  # −∞ less −∞
@pytest.mark.parametrize(
    ("trainer", "engine", "difference"),
    [
        ([-1.0, -2.0], [-1.0, -2.5], 0.5),
        ([-1.0, -2.0], [-1.0, float("nan")], float("inf")),
        ([float("nan"), -2.0], [-1.0, -2.0], float("inf")),
        ([-1.0, float("-inf")], [-1.0, float("-inf")], float("inf")),
    ],
)
def test_the_canary_sings_of_any_log_prob_that_is_no_number(
    worker: Worker, trainer: list[float], engine: list[float], difference: float
) -> None:
    assert worker.policy is not None
    worker.policy.probe_log_probs.return_value = np.float32(trainer)  # type: ignore[attr-defined]
    worker.rollout_role.engine.prompt_log_probs.return_value = np.float32(engine)  # type: ignore[attr-defined]
    assert worker.sync_weights(np.arange(3, dtype=np.int32), version=1).difference == difference
