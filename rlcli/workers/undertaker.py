"""Ends what a killed driver leaves behind.

Ray's daemons notice that their driver was killed, but its agents first try for a minute or more to reach the dead
cluster, and its session folder stays. So the driver starts this small process beside them, tells it through a pipe
which processes are Ray's, and the end of the pipe, however it comes, is the sign to clear up.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys

from rlcli.attempt import remove_leftovers
from rlcli.workers import births

GRACE_S = 2.0
"""How long the processes get to end by themselves once the driver is gone."""


class Undertaker:
    """Held by the driver of a local cluster. folder: the session's, removed at the end with what else bears the name of
    the driver's `group`."""

    def __init__(self, folder: str, group: str) -> None:
        self._folder = folder
        # A session of its own: what ends the driver's terminal must not end this.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, folder, group],  # -P: nothing from the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self) -> None:
        """Note the session's processes as they are now: the driver's children whose command line names its folder, and
        what descends from them. Other children (a tracker's service, say) are not its business.

        Process ids are used again, so each goes with its start.
        """
        import psutil

        found: list[tuple[int, float]] = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # It has ended meanwhile.
                if child.pid != self._process.pid and any(self._folder in word for word in child.cmdline()):
                    found += [(p.pid, births.since_boot_s(p)) for p in (child, *child.children(recursive=True))]
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(found) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Let it clear up now, and wait until it has."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=4 * GRACE_S)


def main(folder: str, group: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all that there is, by systemd for one
        signal.signal(number, signal.SIG_IGN)
    import psutil

    watched: set[tuple[int, float]] = set()
    for line in sys.stdin:
        watched |= {(pid, started) for pid, started in json.loads(line)}
    left = []
    for pid, started in watched:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if births.since_boot_s(process) == started:
                left.append(process)
    _, alive = psutil.wait_procs(left, timeout=GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)
    remove_leftovers(group)


if __name__ == "__main__":
    main(*sys.argv[1:])
