"""CPU time of a scoring process and of all processes that it has started."""

from __future__ import annotations

import os
from contextlib import suppress

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU seconds, to a hundredth, that a process and its descendants have used, threads and ended children included; 0
    for a process that no longer exists.

    A deadline in these seconds is independent of machine load: a process that waits for a core uses none.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After the name, which may contain anything: state is field 3; utime, stime, cutime, cstime are 14 to 17.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    used = sum(map(int, fields[11:15])) / _TICKS_PER_S
    return used + sum(map(cpu_seconds, _children(pid)))


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    with suppress(OSError):  # it has just ended, or the kernel lacks this file (CONFIG_PROC_CHILDREN)
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                pids += map(int, file.read().split())
    return pids
