"""The watchdog of workers: each records its progress in a file, which callers that wait for it read.

`rank-0.stack`, beside the worker's log, begins with a line of fixed length that the worker rewrites at each progress.
After `stall_s` seconds without progress, the stacks of its threads follow. A Python thread writes them, since reading
the stack of a thread that runs Python code needs Python's lock, or the process may crash. Where a hanging C function
keeps that lock, no thread runs Python code, and a C thread writes them without it (`faulthandler`). It is a file
because an actor that hangs cannot answer, while all machines share the run folder.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HEADER_BYTES = 256
MIN_STARTUP_STALL_S = 300.0
"""Minimum time allowed before the first step: importing torch and vLLM from a cold disk, loading and compiling a model.
A limit that suits the steps would be too short for it."""
STARTUP_METHODS = frozenset({"rendezvous", "join", "build"})
INNER_FRAMES, OUTER_FRAMES = 3, 3
"""Number of stack frames shown in a message."""

_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)')
_WAITING_FILES = ("/torch/distributed/", "/threading.py", "/torch/futures/", "<frozen ")
_DISPATCH_FILE = "/cluster/dispatch.py"
"""The file whose frame calls the worker's method; outside it there are only Ray's own frames."""
_WRAPPER_FILES = ("/torch/", "/contextlib.py", "/functools.py", "/threading.py")


def stall_limit_s(method: str, stall_s: float) -> float:
    """Seconds without progress after which a worker counts as stalled in `method`."""
    return max(stall_s, MIN_STARTUP_STALL_S) if method in STARTUP_METHODS else stall_s


def _margin_s(stall_s: float) -> float:
    """Seconds that callers wait after `stall_s`, in which the stacks are written."""
    return min(60.0, max(1.0, stall_s / 10))


class _Watch:
    """Writes the progress file of this process."""

    def __init__(self, path: Path, stall_s: float) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._stall_s = stall_s
        self._count = 0
        self._interval_s = min(1.0, stall_s / 10)
        """Minimum time between two records of progress."""
        self._due = 0.0
        self._stalls_at = float("inf")
        """Time at which the stacks are written unless there is progress before."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.method = ""
        self.begin("")
        self._thread = threading.Thread(target=self._dump_when_stalled, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self, method: str) -> None:
        """Record progress, and restart the timer of the stack dump. method: the running one; empty: idle, no timer."""
        with self._lock:
            faulthandler.cancel_dump_traceback_later()
            now = time.monotonic()
            self.method = method
            self._count += 1
            self._due = now + self._interval_s
            self._stalls_at = float("inf")
            with contextlib.suppress(OSError):  # A full disk is reported by the code that writes important data.
                if os.lseek(self._file, 0, os.SEEK_CUR) != HEADER_BYTES:  # Progress after a dump.
                    os.ftruncate(self._file, HEADER_BYTES)
                    os.lseek(self._file, HEADER_BYTES, os.SEEK_SET)
                header = {"count": self._count, "method": method, "pid": os.getpid(), "host": platform.node()[:64]}
                os.pwrite(self._file, json.dumps(header).ljust(HEADER_BYTES - 1).encode() + b"\n", 0)
            if method:
                limit_s = stall_limit_s(method, self._stall_s)
                self._stalls_at = now + limit_s
                # If the Python thread could not: in time for the callers to read it.
                faulthandler.dump_traceback_later(limit_s + _margin_s(self._stall_s) / 2, file=self._file)

    def _dump_when_stalled(self) -> None:
        while not self._closing.wait(self._interval_s):
            with self._lock:
                if time.monotonic() >= self._stalls_at:
                    faulthandler.cancel_dump_traceback_later()
                    self._stalls_at = float("inf")
                    faulthandler.dump_traceback(self._file)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def progress(self) -> None:
        if self.method and time.monotonic() >= self._due:
            self.begin(self.method)


_watch: _Watch | None = None
listeners: list[Callable[[], None]] = []
"""Called at each progress."""


def start(path: Path, stall_s: float) -> None:
    """Watch this process from now on. path: its file; stall_s: seconds without progress until it dumps its stacks
    there."""
    global _watch
    path.parent.mkdir(parents=True, exist_ok=True)
    _watch = _Watch(path, stall_s)


def stop() -> None:
    """Stop watching at the normal end of this process, and remove its file."""
    global _watch
    if _watch is not None:
        _watch.close()
    _watch = None


def progress() -> None:
    """Record progress. Cheap; no effect outside `watched` and in processes that are not watched."""
    for listener in listeners:
        listener()
    if _watch is not None:
        _watch.progress()


@contextlib.contextmanager
def watched(method: str) -> Iterator[None]:
    """Require progress of the block, including nested ones, every `stall_s` seconds."""
    watch = _watch
    if watch is None or watch.method:
        yield
        return
    watch.begin(method)
    try:
        yield
    finally:
        watch.begin("")


@dataclass(frozen=True)
class Frame:
    """A frame of a thread's stack."""

    file: str
    """Path of the source file."""
    line: int
    """Line number."""
    function: str
    """Name of the function."""

    def __str__(self) -> str:
        short = self.file.rpartition("site-packages/")[2] if "site-packages/" in self.file else self.file
        return f"{self.function} ({'/'.join(Path(short).parts[-3:])}:{self.line})"


@dataclass(frozen=True)
class ProgressRecord:
    """A worker's progress file, as callers read it."""

    count: int
    """Increases with the worker's progress."""
    pid: int
    """Process id of the worker."""
    host: str
    """Name of its machine."""
    method: str
    """The running method; empty if there is none."""
    threads: Sequence[Sequence[Frame]]
    """Stacks of its threads after a stall, innermost frame first; the thread that runs the method comes first."""

    @property
    def waits_for_peers(self) -> bool:
        """True if it waits for other ranks: in a collective, including one in a thread of the backward pass."""
        if not self.threads:
            return False
        main, *others = self.threads
        if _in_collective(main):
            return True
        return bool(main) and main[0].function == "_engine_run_backward" and any(map(_in_collective, others))

    @property
    def location(self) -> str:
        """The frames of the stalled method, innermost first, without those of torch.distributed or threading."""
        frames = [frame for frame in self.threads[0] if not any(part in frame.file for part in _WAITING_FILES)]
        dispatch_index = next((i for i, frame in enumerate(frames) if frame.file.endswith(_DISPATCH_FILE)), len(frames))
        shown = list(map(str, frames[:dispatch_index]))
        if len(shown) > INNER_FRAMES + OUTER_FRAMES:
            shown[INNER_FRAMES:-OUTER_FRAMES] = ["…"]
        return " < ".join(shown) or "a collective"


def _in_collective(frames: Sequence[Frame]) -> bool:
    for frame in frames:
        if "/torch/distributed/" in frame.file:
            return True
        if not any(part in frame.file for part in _WRAPPER_FILES):
            return False
    return False


def read_progress(path: Path) -> ProgressRecord | None:
    """The progress record in a worker's file `path`; None if there is no such file, or it is still empty."""
    try:
        text = path.read_text(errors="replace")
        header = json.loads(text[:HEADER_BYTES])
        return ProgressRecord(
            header["count"], header["pid"], header["host"], header["method"], _threads(text[HEADER_BYTES:])
        )
    except (OSError, ValueError, KeyError):
        return None


def _threads(dump: str) -> list[list[Frame]]:
    """
    >>> _threads('Timeout (0:00:02)!\\nThread 0x1 (most recent call first):\\n  File "/a/b.py", line 3 in f\\n')
    [[Frame(file='/a/b.py', line=3, function='f')]]
    """
    parts = re.split(r"(?:Current thread|Thread) 0x[^\n]*\n", dump)[:0:-1]  # the interpreter lists its oldest last
    threads = [[Frame(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(part)] for part in parts]
    return sorted(threads, key=lambda frames: not any(frame.file.endswith(_DISPATCH_FILE) for frame in frames))


class StallDetector:
    """Measures the time without progress of each rank during one call on a group. Time counts only between two checks,
    so that a caller that was itself suspended does not see all ranks as late.

    paths: the ranks' progress files. stall_s: limit of one rank; None: no limit. no_file_s: limit of a rank without a
    file.
    """

    def __init__(self, paths: Sequence[Path], stall_s: float | None, no_file_s: float) -> None:
        self.stall_s = stall_s or 0.0
        self.interval_s: float | None = None if stall_s is None else min(10.0, max(0.2, stall_s / 10))
        """Seconds between two checks; None: no checks."""
        self._paths = list(paths)
        self._limit_s = float("inf") if stall_s is None else stall_s + _margin_s(stall_s)
        self._no_file_s = no_file_s
        self._idle_s = [0.0] * len(self._paths)
        self._counts = [-1] * len(self._paths)
        self._last_check = time.monotonic()

    def progressed(self, rank: int) -> None:
        self._idle_s[rank] = 0.0

    def stalled(self, waiting: Collection[int]) -> dict[int, ProgressRecord | None]:
        """The ranks among `waiting` that block the call, with their progress records (None: no file), checked at most
        once every `interval_s` seconds. Ranks that wait for others in a collective are not at fault as long as any of
        the others makes progress; if all of them wait, all are returned."""
        elapsed = time.monotonic() - self._last_check
        if self.interval_s is None or elapsed < self.interval_s:
            return {}
        self._last_check += elapsed
        records = {rank: read_progress(self._paths[rank]) for rank in waiting}
        for rank, record in records.items():
            count = -1 if record is None else record.count
            self._idle_s[rank] = (
                self._idle_s[rank] + min(elapsed, 2 * self.interval_s) if count == self._counts[rank] else 0.0
            )
            self._counts[rank] = count
        late = {
            rank: record
            for rank, record in records.items()
            if self._idle_s[rank] > (self._limit_s if record is not None else self._no_file_s)
        }
        blocking = {rank: record for rank, record in late.items() if record is None or not record.waits_for_peers}
        return blocking or (late if len(late) == len(records) else {})
