"""Start times of processes, by clocks that cannot be set."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


def since_boot_s(process: psutil.Process) -> float:
    """Seconds from boot to the start of `process`, in hundredths. Independent of the system clock, so that together
    with the process id it identifies a process permanently. psutil's own `create_time` changes with the system clock,
    and uses the boot time in whole seconds."""
    import psutil

    seconds: float = round(process.create_time() - psutil.boot_time(), 2)
    return seconds


def born(process: psutil.Process) -> float:
    """Start time of `process`, in seconds since 1970, to a hundredth."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s(process)
