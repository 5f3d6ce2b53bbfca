"""Cleans up after a killed driver.

Ray's daemons notice that their driver was killed, but its agents first try for a minute or more to reach the dead
cluster, and its session folder stays. So the driver starts this small process beside them, sends it through a pipe
the ids of Ray's processes, and the end of the pipe, for any reason, starts the clean-up.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlcli.cluster.process import process_time
from rlcli.support.attempt import remove_leftovers

if TYPE_CHECKING:
    from psutil import Process

GRACE_S = 2.0
"""Time for the processes to end by themselves after the driver is gone."""


class Reaper:
    """The driver's handle of the clean-up process of a local cluster. folder: the session's, removed at the end with
    everything else named after the driver's `group`."""

    def __init__(self, folder: str, group: str) -> None:
        self._folder = folder
        # A separate session: the end of the driver's terminal must not end this process.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, folder, group],  # -P: nothing from the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self) -> None:
        """Record the current processes of the session: the driver's children whose command line contains its folder,
        and their descendants. Other children (a tracker's service, for example) are not included.

        Process ids are reused, so each is recorded with its start time.
        """
        import psutil

        processes: list[tuple[int, float]] = []
        for child in self._daemons():
            with contextlib.suppress(psutil.Error):  # The process has ended.
                processes += [(p.pid, process_time.since_boot_s(p)) for p in (child, *child.children(recursive=True))]
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(processes) + "\n")
            self._process.stdin.flush()

    def _daemons(self) -> Iterator[Process]:
        """The driver's children whose command line contains the session's folder."""
        import psutil

        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # The process has ended.
                if child.pid != self._process.pid and any(self._folder in word for word in child.cmdline()):
                    yield child

    def close(self) -> None:
        """Start the clean-up now, and wait until it is done."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=4 * GRACE_S)


def main(folder: str, group: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # systemd, for example, signals every process
        signal.signal(number, signal.SIG_IGN)
    import psutil

    watched: set[tuple[int, float]] = set()
    for line in sys.stdin:
        watched |= {(pid, started) for pid, started in json.loads(line)}
    remaining = []
    for pid, started in watched:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process_time.since_boot_s(process) == started:
                remaining.append(process)
    _, alive = psutil.wait_procs(remaining, timeout=GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)
    remove_leftovers(group)


if __name__ == "__main__":
    main(*sys.argv[1:])
