"""Log-probs of an engine whose weights cannot be compared move with the trainer's, or the run ends."""

from __future__ import annotations

import numpy as np
import pytest

from rlcli.errors import RunFailed
from rlcli.training.worker.weight_sync.sync_checks import QuantizedSyncCheck

TOKENS, ERROR = 63, 0.05


def walk(step: float, follows: float, *, steps: int = 40, stale_from: int = 0) -> int:
    """The sync, from 1, at which an engine is found out that from one step on follows the share `follows` of each of
    the trainer's, with an error that is new at each; 0: never."""
    random = np.random.default_rng(0)
    trainer = -random.random(TOKENS)
    engine, checks = trainer.copy(), QuantizedSyncCheck()
    for number in range(1, steps + 1):
        try:
            checks.check(trainer, engine + ERROR * random.standard_normal(TOKENS), rank=3)
        except RunFailed:
            return number
        move = step * random.standard_normal(TOKENS)
        trainer = trainer + move
        engine = engine + (follows if number > stale_from else 1.0) * move
    return 0


@pytest.mark.parametrize("step", [0.001, 0.02, 0.1, 1.0])
def test_an_engine_that_follows_is_never_found_out(step: float) -> None:
    assert walk(step, 1.0, steps=400) == 0


def test_a_stale_engine_is_found_once_the_trainer_moved_beyond_its_error() -> None:
    assert walk(1.0, 0.0) == 2
    assert walk(1.0, 0.0, stale_from=10) == 12
    assert 2 < walk(0.02, 0.0) < 40
    assert walk(0.02, 0.2, steps=400) > 0
    assert walk(1.0, -1.0) == 2


def test_a_trainer_that_does_not_move_tells_nothing() -> None:
    assert walk(0.0, 0.0) == 0


def test_log_probs_that_are_no_numbers_do_not_pass() -> None:
    checks, log_probs = QuantizedSyncCheck(), np.zeros(TOKENS)
    checks.check(log_probs, log_probs, 0)
    with pytest.raises(RunFailed, match="the log-probs of worker 0's engine have moved by nan of what the trainer's"):
        checks.check(log_probs + 1, log_probs * np.nan, 0)
