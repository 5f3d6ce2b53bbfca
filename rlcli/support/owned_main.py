"""Runs one program, and kills every process that it leaves, even one in another session or group, or one that ignores
signals. It needs the standard library alone:

    python owned_main.py MEMORY_BYTES PROGRAM ARGUMENT…

MEMORY_BYTES: limit of the address space of each of its processes; 0: none. Standard input is a pipe that the owner
holds: the program is killed once the owner closes it or is gone. This process leads a separate group, and ends as the
program does: with its exit status, or by its signal.

Two processes supervise the program: this one and a fork of it. Each is a subreaper: Linux makes it the parent of
orphans among its descendants, so that none escapes. If the program kills one of the two, the other one kills the rest.
It can still kill both at once, as it can kill every process of its user.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence

KILL_S = 20.0
"""Maximum wait for killed processes: disk I/O or a driver call in progress can take a while."""
LOOK_MS = 1000
"""Interval of checks for an owner that is gone although its pipe is open: another process may have opened it too."""
PAUSE_S = 0.001
"""Between two searches for processes to kill."""

_PR_SET_CHILD_SUBREAPER = 36


def supervised(start: Callable[[], int], owner_pipe: int) -> int:
    """Start a process and wait until it ends, until `owner_pipe` ends or until this process's parent is gone; then kill
    all descendants. Returns the exit code of the process; negative for the signal that killed it.

    start: returns the process's id. owner_pipe: the end to read; nothing is ever written to the other end.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    owner = os.getppid()
    woken, wakeup = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):  # SIGTERM, to the whole group, is for the program to obey
        signal.signal(number, lambda *_: None)  # the program would inherit SIG_IGN
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(owner_pipe, select.POLLIN)
    statuses: dict[int, int] = {}
    child = start()
    while child not in statuses and os.getppid() == owner:
        if owner_pipe in dict(poll.poll(LOOK_MS)):
            break
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        reap(statuses)
    kill_descendants(statuses)
    return statuses.get(child, -signal.SIGKILL)


def reap(statuses: dict[int, int]) -> bool:
    """Add the exit codes of children that have ended. Returns True if any child is left."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            statuses[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        return False
    return True


def kill_descendants(statuses: dict[int, int]) -> None:
    """Kill the children of this subreaper until it has none: the children of a killed child become its children."""
    give_up = time.monotonic() + KILL_S
    while reap(statuses):
        remaining = kill_children(os.getpid())
        if time.monotonic() > give_up:
            os.write(2, f"processes are left that cannot be killed: {remaining}\n".encode())
            return
        time.sleep(PAUSE_S)


def kill_children(parent: int) -> list[int]:
    """Send SIGKILL to the children of a process. Returns their ids, without those of zombies.

    Not all kernels list a process's children (CONFIG_PROC_CHILDREN), so that this reads the parent of each process, the
    newest first: one that forks and exits repeatedly has to be killed before its next fork.
    """
    killed = []
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
        with contextlib.suppress(OSError):  # it has ended, or another user's, and cannot be killed
            with open(f"/proc/{pid}/stat", "rb") as stat:
                state, its_parent = stat.read().rpartition(b")")[2].split()[:2]
            if int(its_parent) == parent and state not in b"ZX":
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)
    return killed


def kill_from_outside(supervisor: int) -> None:
    """Kill the process that runs this file, with all of its descendants, if those prevent it from doing so."""
    give_up = time.monotonic() + KILL_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(supervisor, signal.SIGSTOP)  # stopped, it reaps nothing, so that no id of a child is reused
        while kill_children(supervisor) and time.monotonic() < give_up:
            time.sleep(PAUSE_S)
        os.kill(supervisor, signal.SIGKILL)


def started_inside(command: Sequence[str]) -> int:
    """Start the second supervisor, which starts the program. Returns its process id."""
    read, write = os.pipe()
    inner = os.fork()
    if inner:
        os.close(read)
        return inner  # `write` stays open as long as this process lives
    os.close(write)
    end_as(supervised(lambda: started(command), read))
    raise AssertionError("unreachable")


def started(command: Sequence[str]) -> int:
    """Start the program, without this process's standard input. Returns its process id."""
    no_input = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    ignored = [signal.SIGPIPE, signal.SIGXFSZ]  # by Python
    try:
        return os.posix_spawnp(command[0], list(command), os.environ, file_actions=no_input, setsigdef=ignored)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode(errors="replace"))
        os._exit(1)


def end_as(status: int) -> None:
    """End this process with an exit status, or by the signal -`status`."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program may have left its core already
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def main(memory_bytes: str, *command: str) -> None:
    if int(memory_bytes):
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    end_as(supervised(lambda: started_inside(command), owner_pipe=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
