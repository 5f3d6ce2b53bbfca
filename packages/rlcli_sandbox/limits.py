"""The limits of a sandboxed program, and how it ended."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

Excess = Literal["", "cpu", "time", "memory", "output", "disk", "processes"]


@dataclass(frozen=True)
class Limits:
    """Limits of one program; past any of them all of it is killed.

    >>> Limits(wall_s=1.5).memory_bytes == 2**30
    True
    """

    wall_s: float = 4.0
    """Wall-clock seconds from when `main` may begin: the start of the sandbox itself does not count."""
    memory_bytes: int = 1 << 30
    """Resident memory. Files in the working directory come in addition, limited by `disk_bytes`."""
    disk_bytes: int = 64 << 20
    """All files of the working directory together; 1,024 of them at most, of which 256 may be folders."""
    output_bytes: int = 1 << 20
    """Standard output and standard error together, as far as `Child.wait` reads them."""
    cpu_s: float = math.inf
    """CPU seconds of all its threads, from the same moment: on a loaded machine `wall_s` alone would end a program that
    has hardly run."""
    processes: int = 1
    """Processes at once. Above 1 the program may start others, which only bubblewrap can bound and end: `memory_bytes`
    then holds for all of them together, `cpu_s` for the first one."""

    def __post_init__(self) -> None:
        assert min(self.wall_s, self.cpu_s) > 0, self
        assert min(self.memory_bytes, self.disk_bytes) > 0, self
        assert self.output_bytes >= 0, self
        assert self.processes >= 1, self


@dataclass(frozen=True)
class Exit:
    """The end of a program, all of whose processes are gone."""

    status: int
    """Exit status, or minus the number of the signal that ended it (bubblewrap, like a shell, does not distinguish
    `exit(128 + n)` from signal n)."""
    killed_for: Excess
    """The exceeded limit; empty if it ended by itself or by `Child.kill`."""
    stdout: bytes
    """Unread standard output; with `stderr` at most `Limits.output_bytes`."""
    stderr: bytes
    """Unread standard error."""
    seconds: float
    """Wall-clock time from when `main` might begin to the end."""
    cpu_s: float = 0.0
    """CPU time as of the last check."""


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all its threads included, ended ones too; 0 if it no longer exists."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3): CPUCLOCK_SCHED of the whole process
    except OSError:
        return 0.0
