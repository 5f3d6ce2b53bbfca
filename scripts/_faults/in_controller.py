"""Faults of the controller, planted in its process before the first step. `trainer` is the run's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from patches import patch


def cursor_stands_still(trainer: Any) -> None:
    cursor = trainer.source.cursor
    state = cursor.state()

    def take(count: int) -> list[int]:
        return list(cursor.restored(state).take(count))

    patch(cursor, "take", take)


def learning_rate_of_zero(trainer: Any) -> None:
    from rlcli.training.loop import trainer as module

    patch(module, "lr_at", lambda *_, **__: 0.0)


def rows_of_rank_0(trainer: Any) -> None:
    """The last rank trains on the first one's rows."""

    def call(method: Any, *args: Any, **kwargs: Any) -> Any:
        if method.__name__ == "load":
            work, step = args
            args = ([*work[:-1], work[0]], step)
        return original(method, *args, **kwargs)

    original = patch(trainer.workers, "call", call)


def _samples(trainer: Any, **columns: Any) -> None:
    """Each batch has its columns rolled by one sample, where the rollout hands them over."""

    def take(step: int) -> Any:
        batch = original(step)
        rolled = {name: np.roll(getattr(batch.samples, name), 1) for name in columns}
        return replace(batch, samples=replace(batch.samples, **rolled))

    original = patch(trainer.source, "take", take)


def rewards_of_others(trainer: Any) -> None:
    _samples(trainer, score=1, outcome=1)


def rows_of_others(trainer: Any) -> None:
    _samples(trainer, row=1)


def groups_mixed_up(trainer: Any) -> None:
    _samples(trainer, prompt=1)
