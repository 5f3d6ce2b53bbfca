"""The owner's side of one sandboxed program: a separate thread starts, monitors and kills it."""

from __future__ import annotations

import atexit
import contextlib
import io
import marshal
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, cast

from rlcli.errors import SetupError
from rlcli_sandbox import orphans
from rlcli_sandbox.limits import Excess, Exit, Limits, cpu_seconds
from rlcli_sandbox.namespace_processes import Members

TICK_S = 0.02
"""Interval between checks of a program's memory, threads and files."""
START_WITHIN_S = 30.0
"""Maximum time for a sandbox to start; after that it is broken, however busy the machine."""
MAX_THREADS = 256
"""A program that starts more threads is ended as if it exceeded its memory: nothing else limits their kernel memory."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_READ_BYTES = 1 << 16

_living: set[Child] = set()


@dataclass(frozen=True)
class Launch:
    """A backend's description of how to start one program."""

    command: Sequence[str]
    """Command line; `{fd}` becomes the number of the socket between `inside.py` and its owner."""
    order: Mapping[str, object]
    """Settings sent to `inside.py`."""
    environment: Mapping[str, str]
    """Environment of the started process."""
    cwd: str
    """Its working directory."""
    pass_fds: Sequence[int]
    """Descriptors that it inherits."""
    status: Callable[[int], int]
    """Converts its exit status to `Exit.status`."""
    exceeds_disk: Callable[[int], bool]
    """True if the program with this process id has used up the disk."""
    close: Callable[[], None]
    """Frees all resources made for the program."""
    leaves_parent: bool = False
    """True if a process between the program and this one outlives the started one."""
    members: Callable[[int], Members] | None = None
    """Counts all processes of the program with this process id, for programs that may start others; None: this backend
    cannot end them."""


class Child:
    """A program in a sandbox, from when it may begin. Its limits hold whether or not any thread waits for it.

    The thread that starts it lives as long as the program does: to the kernel, the parent in "kill me when my parent
    dies" is the *thread*, and the caller's may end early.
    """

    pid: int
    """The program's id in the owner's namespace."""
    stdin: io.BufferedWriter
    """Buffered for writing; flush it, or let `wait` close it."""
    stdout: io.FileIO
    """Unbuffered; `wait` returns its unread data, and a program whose output is not read blocks."""
    stderr: io.FileIO
    """As `stdout`."""
    _failure: Exception | None = None
    """The reason why it did not start."""

    def __init__(self, launch: Launch, limits: Limits) -> None:
        if limits.processes > 1 and launch.members is None:
            launch.close()
            raise SetupError("only bubblewrap can end all that a program starts", "install bubblewrap")
        self._launch = launch
        self._limits = limits
        self._lock, self._waiting = threading.Lock(), threading.Lock()
        self._started = threading.Event()
        self._killed_for: Excess = ""
        self._killed = False
        self._pidfd = self._parent = -1
        self._exit: Exit | None = None
        self._status = 0
        self._seconds = 0.0
        self.cpu_s = 0.0
        """CPU seconds used, as of the last check."""
        self._thread = threading.Thread(target=self._live, name="rlcli-sandbox", daemon=True)
        _living.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:  # the owner may be out of threads
            _living.discard(self)
            launch.close()
            raise SetupError(f"the sandbox did not start: {error}") from None
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def kill(self) -> None:
        """End the program if it is still running; nothing of it is left when this returns. Idempotent."""
        self._kill("")
        self._thread.join()

    def wait(self) -> Exit:
        """Close its standard input, read its output, and return when nothing of it is left, within its limits.

        A second call returns the same. All three pipes are closed afterwards. Write no more than the program reads
        before it writes, or read meanwhile: two full pipes deadlock until its time is up.
        """
        with self._waiting:
            if self._exit is None:
                with contextlib.suppress(BrokenPipeError, ValueError):
                    self.stdin.close()
                stdout, stderr = self._drain()
                self._thread.join()
                self._exit = Exit(self._status, self._killed_for, stdout, stderr, self._seconds, self.cpu_s)
                self._close_pipes()
            return self._exit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _drain(self) -> tuple[bytes, bytes]:
        """Read the two output pipes until they end or the program has, `output_bytes` together at most."""
        pipes = [pipe for pipe in (self.stdout, self.stderr) if not pipe.closed]
        output = {pipe.fileno(): bytearray() for pipe in pipes}
        room = self._limits.output_bytes
        poll = select.poll()  # not select.select, which supports no descriptor above 1023
        for fd in output:
            poll.register(fd, select.POLLIN)
        open_pipes = len(output)
        while open_pipes:
            # A process forked elsewhere in the owner may hold a pipe open: stop when the program has ended, too.
            ended = not self._thread.is_alive()
            ready = poll.poll(0 if ended else TICK_S * 1000)
            for fd, _ in ready:
                data = os.read(fd, _READ_BYTES)
                if not data:
                    poll.unregister(fd)
                    open_pipes -= 1
                if len(data) > room:
                    self._kill("output")
                output[fd] += data[:room]
                room -= min(room, len(data))
            if ended and not ready:
                break
        stdout, stderr = (b"" if pipe.closed else bytes(output[pipe.fileno()]) for pipe in (self.stdout, self.stderr))
        return stdout, stderr

    def _kill(self, reason: Excess) -> None:
        with self._lock:
            if not self._killed:
                self._killed, self._killed_for = True, reason
                self._end()

    def _end(self) -> None:
        # The parent is the first process of the program's PID namespace: the kernel ends all others with it, at once.
        for pidfd in (self._parent, self._pidfd) if self._limits.processes > 1 else (self._pidfd,):
            if pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _live(self) -> None:
        """The thread: start, watch, reap, clean up."""
        with orphans.adopting() if self._launch.leaves_parent else contextlib.nullcontext():
            self._start_and_watch()

    def _start_and_watch(self) -> None:
        process = None
        try:
            try:
                process = self._start()
            except OSError as error:
                self._failure = SetupError(f"the sandbox did not start: {error}")
                return
            except Exception as error:
                self._failure = error
                return
            finally:
                self._started.set()
            self._watch()
            self._status = self._launch.status(process.wait())
        finally:
            with self._lock:
                parent, self._parent = self._parent, -1
            orphans.reap(parent)
            with self._lock:
                if self._pidfd >= 0:
                    os.close(self._pidfd)
                self._pidfd = -1
            self._launch.close()
            _living.discard(self)

    def _start(self) -> subprocess.Popen[bytes]:
        """The started process, isolated and released; `pid` and the pipes are set. Raises `SetupError`."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = subprocess.Popen(
                    [part.format(fd=theirs.fileno()) if part == "{fd}" else part for part in self._launch.command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=self._launch.environment,
                    cwd=self._launch.cwd,
                    pass_fds=[theirs.fileno(), *self._launch.pass_fds],
                    start_new_session=True,
                )
            self.stdin, self.stdout, self.stderr = _pipes(process)
            try:
                self._lock_in(ours)
            except BaseException as error:
                process.kill()
                process.wait()
                raise self._not_up(error) from None
        return process

    def _lock_in(self, ours: socket.socket) -> None:
        ours.settimeout(START_WITHIN_S)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        order = marshal.dumps(dict(self._launch.order))
        ours.sendall(struct.pack("<I", len(order)) + order)
        report, ancillary, _, _ = ours.recvmsg(1000, socket.CMSG_SPACE(12))
        if report != b"ready":
            raise OSError(report.decode(errors="replace"))
        # The id, translated by the kernel to the owner's namespace.
        self.pid = next(struct.unpack("iII", data)[0] for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS)
        self._pidfd = os.pidfd_open(self.pid)
        if self._launch.leaves_parent:
            self._parent = orphans.parent_of(self.pid)
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/oom_score_adj", "w") as score:
            score.write("1000")  # if the machine runs out of memory, this is killed first
        ours.sendall(b"!")

    def _not_up(self, error: BaseException) -> SetupError:
        """The reason why the sandbox did not start: the report of `inside.py`, or its last output. Closes the pipes."""
        os.set_blocking(self.stderr.fileno(), False)
        last = (self.stderr.read(_READ_BYTES) or b"").decode(errors="replace").strip().splitlines()[-1:]
        self._close_pipes()
        report = str(error) if isinstance(error, OSError) and error.errno is None else ""
        return SetupError(f"the sandbox did not start: {report or ''.join(last) or repr(error)}")

    def _watch(self) -> None:
        """Return when the program has ended; kill it if it exceeds a limit."""
        started, started_cpu = time.monotonic(), cpu_seconds(self.pid)
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        next_disk_check = started
        while True:
            remaining_s = self._limits.wall_s - (time.monotonic() - started)
            if poll.poll(max(0.0, min(TICK_S, remaining_s)) * 1000):
                break
            now = time.monotonic()
            self.cpu_s = max(self.cpu_s, cpu_seconds(self.pid) - started_cpu)
            if self.cpu_s >= self._limits.cpu_s:
                self._kill("cpu")
            elif now - started >= self._limits.wall_s:
                self._kill("time")
            elif self._exceeds_memory():
                self._kill("memory")
            elif excess := self._excess_of_members():
                self._kill(excess)
            elif now >= next_disk_check:
                if self._launch.exceeds_disk(self.pid):
                    self._kill("disk")
                # Checks take at most half of the time, however many files there are.
                next_disk_check = 2 * time.monotonic() - now
            if self._killed:
                self._end()  # the kill may have been requested before the process existed
                poll.poll()
                break
        self._seconds = time.monotonic() - started

    def _excess_of_members(self) -> Excess:
        if self._launch.members is None or self._limits.processes == 1:
            return ""
        members = self._launch.members(self.pid)
        if members.processes > self._limits.processes + 1:  # bubblewrap's own
            return "processes"
        return "memory" if members.resident_bytes > self._limits.memory_bytes else ""

    def _exceeds_memory(self) -> bool:
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as statm:
                resident = int(statm.read().split()[1]) * _PAGE
            threads = os.stat(f"/proc/{self.pid}/task").st_nlink - 2
        except (OSError, IndexError):
            return False  # it has just ended
        return resident > self._limits.memory_bytes or threads > MAX_THREADS


def _pipes(process: subprocess.Popen[bytes]) -> tuple[io.BufferedWriter, io.FileIO, io.FileIO]:
    """Standard input, output and error; the last two unbuffered: a buffer would hide available data from `select`."""
    stdout = cast(io.BufferedReader, process.stdout).detach()
    stderr = cast(io.BufferedReader, process.stderr).detach()
    return cast(io.BufferedWriter, process.stdin), cast(io.FileIO, stdout), cast(io.FileIO, stderr)


@atexit.register
def _end_all() -> None:
    """When an owner exits, end its programs and remove their folders. If it is killed, `sweep` removes them later."""
    for child in list(_living):
        with contextlib.suppress(RuntimeError):  # its thread has not started
            child.kill()


os.register_at_fork(after_in_child=_living.clear)  # a forked process owns none of the programs
