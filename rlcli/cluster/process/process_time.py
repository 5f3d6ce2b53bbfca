"""Start times of processes, by clocks that cannot be set."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


def since_boot_s(process: psutil.Process) -> float:
    """Seconds from boot to the start of `process`, in hundredths, from the kernel. Independent of the system clock, so
    that together with the process id it identifies a process permanently: psutil's `create_time` changes with the
    clock. Raises `psutil.NoSuchProcess`."""
    import psutil

    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(process.pid) from None
    ticks = stat.rpartition(")")[2].split()[19]  # field 22; the process's name, in parentheses, is field 2
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def started_at(process: psutil.Process) -> float:
    """Start time of `process`, in seconds since 1970, to a hundredth."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s(process)
