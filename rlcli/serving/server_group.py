"""The processes of one server: a group of their own, which ends with this process, however that ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcli.sandbox import owned_main

END_S = 10.0
"""How long the processes of a server may take to end by themselves."""
TAIL_LINES, TAIL_TEXT = 6, 1000


def start_group(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start `command`, whose output is appended to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", owned_main.__file__, "0", *command],
            env=environment,
            stdin=subprocess.PIPE,  # its end ends the server
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End all its processes: the group may outlive its leader. Harmless when repeated."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + END_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.05)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def tail_of(log: Path) -> str:
    """The last lines of a server's log, as one."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join([line.strip() for line in lines if line.strip()][-TAIL_LINES:])[-TAIL_TEXT:]
