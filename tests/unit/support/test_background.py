"""Files for viewers are written in the background, in order, without delaying the run."""

from __future__ import annotations

import threading

from rlcli.errors import RunFailed
from rlcli.support.background_writer import MOST_WAITING, BackgroundWriter


def test_work_is_done_in_order_and_a_flush_waits_for_it() -> None:
    done: list[int] = []
    writer = BackgroundWriter("records")
    writer.flush()
    for number in range(MOST_WAITING):
        writer.put(lambda number=number: done.append(number))  # type: ignore[misc]
    writer.flush()
    assert done == list(range(MOST_WAITING))
    assert writer.idle
    assert writer.problem() == ""


def test_an_error_is_told_once_and_does_not_stop_what_follows() -> None:
    def fails() -> None:
        raise RunFailed("cannot write a: full", "make room")

    done: list[bool] = []
    writer = BackgroundWriter("records")
    for work in (fails, fails, lambda: done.append(True)):
        writer.put(work)
        writer.flush()
    assert done == [True]
    assert writer.problem() == "records could not be written: cannot write a: full"
    assert writer.problem() == ""


def test_work_beyond_the_bound_is_left_out_and_nobody_waits() -> None:
    gate, started, done = threading.Event(), threading.Event(), list[int]()

    def first() -> None:
        started.set()
        gate.wait(60)

    writer = BackgroundWriter("records")
    writer.put(first)
    assert started.wait(60)
    for number in range(MOST_WAITING + 3):
        writer.put(lambda number=number: done.append(number))  # type: ignore[misc]
    assert not writer.idle
    gate.set()
    writer.flush()
    assert done == list(range(MOST_WAITING))
    assert writer.problem() == "the disk is too slow for all records: some are left out"
