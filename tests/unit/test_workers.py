"""What crosses between the controller and the workers, without Ray."""

from __future__ import annotations

import pytest

from rlcli.workers.dispatch import add_up, dispatch, dispatch_of
from rlcli.workers.work import sample_seed
from rlcli.workers.worker import Worker


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
    for name in ("rollout", "load", "compute_old_log_probs", "compute_reference_log_probs", "update", "sync_weights"):
        dispatch_of(Worker, name)
