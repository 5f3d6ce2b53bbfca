"""When processes began, by clocks that nobody sets."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


def since_boot_s(process: psutil.Process) -> float:
    """Seconds from the boot until `process` began, in hundredths: the same however the system's time is set, so that
    with the process id it names a process for good. psutil's own `create_time` moves with the system's time, and knows
    of the boot in whole seconds only."""
    import psutil

    seconds: float = round(process.create_time() - psutil.boot_time(), 2)
    return seconds


def born(process: psutil.Process) -> float:
    """When `process` began, in seconds since 1970, to a hundredth."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s(process)
