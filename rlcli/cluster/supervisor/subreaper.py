"""Runs a child process, waits for it and its orphaned descendants, and forwards each signal to it once.

Linux makes the nearest ancestor that is a subreaper the parent of an orphaned process. So the orphans of a killed child
(daemons that have left its session, their workers) become children of this process, which waits for and ends them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Mapping, Sequence

import psutil

from rlcli.cluster.supervisor.stop_signals import REPEAT_S
from rlcli.support.attempt import REFUSED

LEAVE_S = 15.0
"""Time for the child to exit after the second signal."""
KILL_S = 20.0
"""Maximum wait for killed processes: disk I/O or a driver call in progress can take a while."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)


class Children:
    """Runs one child after another, on this process's terminal but in a separate process group.

        with Children(grace_s=5.0) as children:
            status = children.run(["python", "work.py"], os.environ)

    SIGINT, SIGTERM and SIGHUP are forwarded only to the child, however many processes the terminal, a shell or
    `timeout` sends them to: the daemons that it needs to finish its work do not get them. asked: number of signals;
    simultaneous ones count as one. After the second the child has LEAVE_S to exit. Ctrl-Z stops and continues it too.

    grace_s: time for a child's orphans to end by themselves. While this is entered, this process must not start other
    processes from a second thread.
    """

    def __init__(self, grace_s: float) -> None:
        self.asked = 0
        self._grace_s = grace_s
        self._last_signal_at = float("-inf")
        self._leave_by = float("inf")
        self._signals = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGTSTP}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            self._signals.add(signal.SIGHUP)

    def __enter__(self) -> Children:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # If this process has replaced a shell (exec), it has inherited the shell's children.
        self._strangers = {child.pid for child in psutil.Process().children()}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        return self

    def __exit__(self, *_: object) -> None:
        while signal.sigtimedwait(self._signals, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def run(self, words: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start a child and wait until it and its orphans are gone. Returns its exit code; negative for the signal that
        killed it."""
        child = self._start(words, environment)
        statuses: dict[int, int] = {}
        while child not in statuses:
            self._listen(1.0, child)
            statuses |= self._reaped()
            if time.monotonic() > self._leave_by:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        # A refused command has done nothing that an orphan could still save: Ray may have been starting.
        self._end_orphans(0.0 if statuses[child] == REFUSED else self._grace_s)
        return statuses[child]

    def pause(self, seconds: float) -> None:
        """Wait, unless asked to exit."""
        until = time.monotonic() + seconds
        while not self.asked and (remaining_s := until - time.monotonic()) > 0:
            self._listen(remaining_s)

    def _start(self, words: Sequence[str], environment: Mapping[str, str]) -> int:
        parent = os.getpid()
        child = os.fork()
        if child:
            with contextlib.suppress(OSError):  # Both do it, so that it is done before either continues.
                os.setpgid(child, child)
            return child
        try:
            os.setpgid(0, 0)
            for number in (signal.SIGTTIN, signal.SIGTTOU):  # A background job that may write to the terminal.
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # A script's shell ignores it for «&» jobs.
            # If this process is killed, the child must finish its step, save and exit.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() == parent:
                signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
                os.execve(words[0], list(words), dict(environment))
        finally:
            os._exit(127)

    def _listen(self, seconds: float, child: int = 0) -> None:
        """Wait for a signal, and forward it to `child`."""
        received = signal.sigtimedwait(self._signals, seconds)
        if received is None or received.si_signo == signal.SIGCHLD:
            return
        with contextlib.suppress(ProcessLookupError):
            if received.si_signo == signal.SIGTSTP:
                self._stop_with(child)
            elif time.monotonic() - self._last_signal_at >= REPEAT_S:
                self._last_signal_at = time.monotonic()
                self.asked += 1
                if self.asked == 2:
                    self._leave_by = time.monotonic() + LEAVE_S
                if child:
                    os.kill(child, received.si_signo)

    def _stop_with(self, child: int) -> None:
        if child:
            os.killpg(child, signal.SIGSTOP)
        # Left to the kernel: it stops no process that has no shell to return to (`ssh -t host rlcli …`).
        signal.raise_signal(signal.SIGTSTP)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
        if child:
            os.killpg(child, signal.SIGCONT)

    def _reaped(self) -> dict[int, int]:
        """Children that have ended, with their exit codes."""
        ended: dict[int, int] = {}
        with contextlib.suppress(ChildProcessError):
            while (pid_and_status := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                ended[pid_and_status[0]] = os.waitstatus_to_exitcode(pid_and_status[1])
        return ended

    def _end_orphans(self, grace_s: float) -> None:
        """Wait `grace_s` for the new descendants of this process to end, then kill them."""
        kill_from = time.monotonic() + grace_s
        while (self._reaped() or True) and (orphans := self._descendants()) and time.monotonic() < kill_from + KILL_S:
            for process in orphans:
                if self.asked > 1 or time.monotonic() >= kill_from:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            self._listen(0.1)

    def _descendants(self) -> list[psutil.Process]:
        """New descendants of this process."""
        descendants = []
        for child in psutil.Process().children():
            if child.pid not in self._strangers:
                descendants.append(child)
                with contextlib.suppress(psutil.Error):
                    descendants += child.children(recursive=True)
        return descendants


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
