"""Asking a run to stop, within one process; across processes it is tested with the supervisor."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlcli.cluster.supervisor.stop_signals import REPEAT_S, StopOnSignal, ignoring_signals


def test_once_finishes_the_step_and_twice_leaves_at_once() -> None:
    requests: list[bool] = []
    with StopOnSignal(lambda: requests.append(True)) as stop:
        stop.armed = True
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # of the same moment: the same request
        assert (stop.requested, requests) == (True, [True])
        time.sleep(REPEAT_S)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)


def test_before_there_is_a_step_to_finish_once_is_enough() -> None:
    with StopOnSignal(lambda: None), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_cuts_clearing_up_short(number: signal.Signals) -> None:
    with StopOnSignal(lambda: None):
        with ignoring_signals():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) != signal.SIG_IGN


def test_a_run_in_a_thread_of_a_program_leaves_its_signals_alone() -> None:
    handler = signal.getsignal(signal.SIGINT)

    def run() -> bool:
        with StopOnSignal(lambda: None) as stop, ignoring_signals():
            return stop.requested

    with ThreadPoolExecutor() as threads:
        assert not threads.submit(run).result()
    assert signal.getsignal(signal.SIGINT) == handler
