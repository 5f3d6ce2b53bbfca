"""The controller's cost is per sample and flat: counted in bytes that cross to ranks and back, and in what stays."""

from __future__ import annotations

import gc
import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts" / "bench"))

import controller as bench

PROMPTS, SAMPLES = 64, 8


def crossed(ranks: int, length: int, prompts: int = PROMPTS) -> tuple[int, int]:
    """Bytes that a step sends to all ranks, and that it gets from them."""
    args = Namespace(rank_count=ranks, length=length, prompts=prompts, samples=SAMPLES, minibatches=2)
    workers = bench.Loopback([bench.FakeRank(rank, ranks, length, 1) for rank in range(ranks)])
    with bench.trainer_over(workers, args, 9) as trainer:
        for step in (1, 2):  # which measure the trainer's noise as well
            trainer.after_step(step, trainer.step(step))
        workers.account.clear()
        trainer.after_step(3, trainer.step(3))
    return sum(workers.account.sent.values()), sum(workers.account.received.values())


def test_what_crosses_does_not_depend_on_how_long_responses_are() -> None:
    short, long = crossed(4, 256), crossed(4, 32768)
    assert long == pytest.approx(short, rel=0.05)


def test_what_crosses_is_some_hundred_bytes_a_sample() -> None:
    sent, received = crossed(4, 1024, 4 * PROMPTS)
    # Of what is sent most is the prompt, 120 tokens and 300 characters here, once for its 8 samples.
    assert sent < 300 * 4 * PROMPTS * SAMPLES
    assert received < 200 * 4 * PROMPTS * SAMPLES


def test_ranks_beyond_the_first_are_told_only_of_their_own_share() -> None:
    """Step data shared by all ranks (columns of all samples, the queue of prompts, references to the shards) is sent
    once."""
    few, many = crossed(4, 1024), crossed(64, 1024)
    assert many[0] - few[0] < 60 * 2500
    assert many[1] - few[1] < 60 * 3300  # of which 0.8 kB are the sums of the log-prob check


def test_a_step_calls_each_rank_seven_times() -> None:
    """To generate, give its tokens, free the engine's memory, load, update, sync, and report its memory: with 256 ranks
    each further call would be a tenth of a second. (The first two steps and every tenth one also measure the trainer's
    noise.)"""
    args = Namespace(rank_count=4, length=256, prompts=PROMPTS, samples=SAMPLES, minibatches=1)
    workers = bench.Loopback([bench.FakeRank(rank, 4, 256, 1) for rank in range(4)])
    with bench.trainer_over(workers, args, 9) as trainer:
        for step in (1, 2):
            trainer.after_step(step, trainer.step(step))
        workers.account.clear()
        trainer.after_step(3, trainer.step(3))
    assert workers.account.calls == 7 * 4


@pytest.mark.long
def test_nothing_that_steps_leave_behind_grows_with_them() -> None:
    args = Namespace(rank_count=4, length=1024, prompts=PROMPTS, samples=SAMPLES, minibatches=2)
    workers = bench.Loopback([bench.FakeRank(rank, 4, 1024, 1) for rank in range(4)])

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    with bench.trainer_over(workers, args, 99) as trainer:
        for step in (1, 2, 3):
            trainer.after_step(step, trainer.step(step))
        object_count = objects()
        for step in range(4, 14):
            trainer.after_step(step, trainer.step(step))
        assert objects() - object_count < 512  # the samples of one of ten steps
