"""The processes of one server: a process group that ends with this process, even if this is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlcli.support import owned_main
from rlcli.support.redact import without_secrets

END_S = 10.0
"""Time that the processes of a server may take to end by themselves."""
HUB_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
"""Environment variables with which a server loads a model from the hub."""
TAIL_LINES, TAIL_TEXT = 6, 1000


def inherited() -> dict[str, str]:
    """The environment variables of this process that a server inherits: no secret but the hub's."""
    return without_secrets(os.environ, HUB_SECRETS)


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
    """End all its processes: those that do not end by themselves are killed, also those that have left its group.
    Idempotent."""
    if not _ended(process, lambda: os.killpg(process.pid, signal.SIGTERM)):
        assert process.stdin is not None
        _ended(process, process.stdin.close)  # the supervisor kills the others
        _ended(process, lambda: os.killpg(process.pid, signal.SIGKILL))
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _ended(process: subprocess.Popen[bytes], end: Callable[[], None]) -> bool:
    """Call `end`, and wait for up to END_S until no process of the group is left. Returns whether none is."""
    until = time.monotonic() + END_S
    try:
        end()
        while time.monotonic() < until:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    except ProcessLookupError:
        return True
    return False


def tail_of(log: Path) -> str:
    """The last lines of a server's log, as one."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join([line.strip() for line in lines if line.strip()][-TAIL_LINES:])[-TAIL_TEXT:]
