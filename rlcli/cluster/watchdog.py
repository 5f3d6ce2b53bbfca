"""The watchdog of workers: each records its progress in a file, which callers that wait for it read.

`rank-0.stack`, beside the worker's log, begins with a line of fixed length that the worker rewrites at each progress.
After `stall_s` seconds without progress, the stacks of its threads follow, written by a C thread that does not need
Python's lock (`faulthandler`). It is a file because an actor that hangs cannot answer, while all machines share the run
folder.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import platform
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HEADER_BYTES = 256
START_S = 300.0
"""Minimum time allowed before the first step: importing torch and vLLM from a cold disk, loading and compiling a model.
A limit that suits the steps would be too short for it."""
STARTING = frozenset({"rendezvous", "join", "build"})
INNERMOST, OUTERMOST = 3, 3
"""Number of stack frames shown in a message."""

_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)')
_WAITING = ("/torch/distributed/", "/threading.py", "/torch/futures/", "<frozen ")
_WRAPPER = "/cluster/dispatch.py"
"""The file whose frame calls the worker's method; outside it there are only Ray's own frames."""
_PLUMBING = ("/torch/", "/contextlib.py", "/functools.py", "/threading.py")


def bound(method: str, stall_s: float) -> float:
    """Seconds without progress after which a worker has stalled in `method`."""
    return max(stall_s, START_S) if method in STARTING else stall_s


class _Watch:
    """The watchdog inside the worker."""

    def __init__(self, path: Path, stall_s: float) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._stall_s = stall_s
        self._count = 0
        self._due = 0.0
        self.method = ""
        self.begin("")

    def begin(self, method: str) -> None:
        """Start counting now. method: the running one; empty: idle, so nothing is expected."""
        faulthandler.cancel_dump_traceback_later()
        self.method = method
        self._count += 1
        self._due = time.monotonic() + min(1.0, self._stall_s / 10)
        with contextlib.suppress(OSError):  # A full disk is reported by the code that writes important data.
            if os.lseek(self._file, 0, os.SEEK_CUR) != HEADER_BYTES:  # After a dump, the worker made progress again.
                os.ftruncate(self._file, HEADER_BYTES)
                os.lseek(self._file, HEADER_BYTES, os.SEEK_SET)
            note = {"count": self._count, "method": method, "pid": os.getpid(), "host": platform.node()[:64]}
            os.pwrite(self._file, json.dumps(note).ljust(HEADER_BYTES - 1).encode() + b"\n", 0)
        if method:
            faulthandler.dump_traceback_later(bound(method, self._stall_s), file=self._file)

    def close(self) -> None:
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
class Note:
    """The content of a worker's file."""

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
    def waits(self) -> bool:
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
        frames = [frame for frame in self.threads[0] if not any(part in frame.file for part in _WAITING)]
        ours = next((i for i, frame in enumerate(frames) if frame.file.endswith(_WRAPPER)), len(frames))
        shown = list(map(str, frames[:ours]))
        if len(shown) > INNERMOST + OUTERMOST:
            shown[INNERMOST:-OUTERMOST] = ["…"]
        return " < ".join(shown) or "a collective"


def _in_collective(frames: Sequence[Frame]) -> bool:
    for frame in frames:
        if "/torch/distributed/" in frame.file:
            return True
        if not any(part in frame.file for part in _PLUMBING):
            return False
    return False


def read_note(path: Path) -> Note | None:
    """The last note of the worker whose file is `path`; None if there is no such file, or it is still empty."""
    try:
        text = path.read_text(errors="replace")
        header = json.loads(text[:HEADER_BYTES])
        return Note(header["count"], header["pid"], header["host"], header["method"], _threads(text[HEADER_BYTES:]))
    except (OSError, ValueError, KeyError):
        return None


def _threads(dump: str) -> list[list[Frame]]:
    """
    >>> _threads('Timeout (0:00:02)!\\nThread 0x1 (most recent call first):\\n  File "/a/b.py", line 3 in f\\n')
    [[Frame(file='/a/b.py', line=3, function='f')]]
    """
    parts = re.split(r"(?:Current thread|Thread) 0x[^\n]*\n", dump)[:0:-1]  # the interpreter lists its oldest last
    threads = [[Frame(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(part)] for part in parts]
    return sorted(threads, key=lambda frames: not any(frame.file.endswith(_WRAPPER) for frame in frames))


class StallDetector:
    """Measures the time without progress of each rank during one call on a group. Time counts only between two checks,
    so that a caller that was itself suspended does not see all ranks as late.

    paths: the ranks' files. stall_s: of one rank; None: no limit. unseen_s: of a rank without a file. every: seconds
    between two checks.
    """

    def __init__(self, paths: Sequence[Path], stall_s: float | None, unseen_s: float) -> None:
        self.stall_s = stall_s or 0.0
        self.every = None if stall_s is None else min(10.0, max(0.2, stall_s / 10))
        self._paths = list(paths)
        self._limit = float("inf") if stall_s is None else stall_s + min(60.0, max(1.0, stall_s / 10))
        self._unseen_s = unseen_s
        self._silent = [0.0] * len(self._paths)
        self._counts = [-1] * len(self._paths)
        self._looked = time.monotonic()

    def progressed(self, rank: int) -> None:
        self._silent[rank] = 0.0

    def stalled(self, waiting: Collection[int]) -> dict[int, Note | None]:
        """The ranks among `waiting` that block the call, with their notes (None: no note), checked at most once every
        `every` seconds. Ranks that wait for others in a collective are not at fault as long as any of the others makes
        progress; if all of them wait, all are returned."""
        elapsed = time.monotonic() - self._looked
        if self.every is None or elapsed < self.every:
            return {}
        self._looked += elapsed
        notes = {rank: read_note(self._paths[rank]) for rank in waiting}
        for rank, note in notes.items():
            count = -1 if note is None else note.count
            self._silent[rank] = (
                self._silent[rank] + min(elapsed, 2 * self.every) if count == self._counts[rank] else 0.0
            )
            self._counts[rank] = count
        late = {
            rank: note
            for rank, note in notes.items()
            if self._silent[rank] > (self._limit if note is not None else self._unseen_s)
        }
        blocking = {rank: note for rank, note in late.items() if note is None or not note.waits}
        return blocking or (late if len(late) == len(notes) else {})
