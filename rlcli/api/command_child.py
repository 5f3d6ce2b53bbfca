"""The process of a command that a program has started: python -m rlcli.api.command_child PARENT COMMAND…

PARENT is the id of the program's process. If the program ends, so does the command: a run finishes its step first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def stop_with(parent: int) -> None:
    """Send this process SIGTERM when the process `parent`, which has started it, ends, or now if it has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    stop_with(int(sys.argv.pop(1)))
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # its process group may write to the terminal
    from rlcli.cli.main import main

    sys.exit(main())
