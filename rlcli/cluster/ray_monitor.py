"""Detects the loss of the Ray cluster while the driver waits.

After the death of a local daemon, Ray lets the driver wait for seconds or a minute, and then ends the process silently.
So threads of the driver watch the daemons, and report which one died.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from rlcli.support.attempt import REPORTED, is_supervised
from rlcli.support.redact import printable

OnLost = Callable[[str, str], NoReturn]
"""Called with the process that died and a message, in a thread while the main one may hang; exits the process."""

POLL_S, CONNECT_TIMEOUT_S = 5.0, 5.0
HEAD_LOST_S = 40.0
"""Time for which the head of a running cluster may be unreachable: it may come back. Ray exits silently after 60 s."""


def exit_on_loss(who: str, message: str) -> NoReturn:
    """Print the message and exit: an `OnLost` for commands without a run to resume."""
    print(printable(f"error: {message}"), file=sys.stderr, flush=True)
    os._exit(REPORTED if is_supervised() else 1)


class DaemonMonitor:
    """Calls `on_lost` when one of `daemons`, process id → name, ends before `close`."""

    def __init__(self, daemons: Mapping[int, str], on_lost: OnLost) -> None:
        self._on_lost = on_lost
        self._names: dict[int, str] = {}
        for pid, name in daemons.items():
            try:
                self._names[os.pidfd_open(pid)] = name
            except ProcessLookupError:
                on_lost("the Ray head", f"the Ray head ({name}) died")
            except OSError:
                continue  # A kernel before 5.3 has no such descriptors: only Ray will notice.
        self._closing = os.eventfd(0)
        self._thread = threading.Thread(target=self._watch, name="ray-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        for descriptor in (*self._names, self._closing):
            os.close(descriptor)

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in (*self._names, self._closing):
            poll.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll()}
        if self._closing not in ended:
            self._on_lost("the Ray head", f"the Ray head ({self._names[min(ended)]}) died")


class HeadMonitor:
    """Calls `on_lost` when the head of the running cluster at `address` (host:port) cannot be reached for
    HEAD_LOST_S, until `close`."""

    def __init__(self, address: str, on_lost: OnLost) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._on_lost = (host, int(port)), on_lost
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="head-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        seen, why, away = time.monotonic(), "", 0.0
        while away <= HEAD_LOST_S:
            if self._closing.wait(POLL_S):
                return
            why = self._unreachable()
            seen = seen if why else time.monotonic()
            away = time.monotonic() - seen
        host, port = self._address
        self._on_lost("the Ray head", f"the Ray head at {host}:{port} has not answered for {away:.0f} s: {why}")

    def _unreachable(self) -> str:
        try:
            socket.create_connection(self._address, timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""
