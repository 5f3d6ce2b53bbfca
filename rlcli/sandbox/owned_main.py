"""Runs one program, and ends it, with all that it has started, once its owner is gone. It needs the standard library:

    python owned_main.py MEMORY_BYTES PROGRAM ARGUMENT…

MEMORY_BYTES: limit of the address space of each of its processes; 0: none. Standard input is a pipe that the owner
holds. This process leads a group of its own, and ends as the program does: with its exit status, or by its signal.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading


def end_with_owner() -> None:
    """Nothing is ever written to the pipe: what comes is its end."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def main(memory_bytes: str, *command: str) -> None:
    if int(memory_bytes):
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    try:
        program = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")
    threading.Thread(target=end_with_owner, daemon=True).start()
    status = program.wait()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program may have left its core already
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
