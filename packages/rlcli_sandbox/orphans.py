"""Adopt and reap processes that a backend leaves behind, because not every machine's first process does that.

bubblewrap puts a separate process above the program and does not wait for it. The kernel reparents it to the nearest
subreaper, else to process 1; if that one reaps nothing (many containers), it would remain a zombie.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
from collections.abc import Iterator

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_ENDS_WITHIN_MS = 5000

_lock = threading.Lock()
_adopting = 0
_was_subreaper = False


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """While any thread is in this context, this process adopts orphaned descendants."""
    global _adopting, _was_subreaper
    with _lock:
        _adopting += 1
        if _adopting == 1:
            _was_subreaper = _is_subreaper()
            _set_subreaper(True)
    try:
        yield
    finally:
        with _lock:
            _adopting -= 1
            if _adopting == 0:
                _set_subreaper(_was_subreaper)


def parent_of(pid: int) -> int:
    """A pidfd of a process's parent, to be closed by `reap`; -1 if that is this process or cannot be determined."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as stat:
        parent = int(stat.read().rpartition(b")")[2].split()[1])
        if parent > 1 and parent != os.getpid():
            return os.pidfd_open(parent)
    return -1


def reap(pidfd: int) -> None:
    """Wait for an adopted process to end, reap it and close its pidfd; nothing for one that is not ours, and for -1."""
    if pidfd < 0:
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if poll.poll(_ENDS_WITHIN_MS):
            with contextlib.suppress(ChildProcessError):  # it has been reaped
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    finally:
        os.close(pidfd)


def _is_subreaper() -> bool:
    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    return bool(value.value)


def _set_subreaper(on: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def _forget() -> None:
    global _adopting, _lock
    _adopting, _lock = 0, threading.Lock()


os.register_at_fork(after_in_child=_forget)  # a forked process is no subreaper
