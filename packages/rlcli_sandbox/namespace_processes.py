"""Counts all processes of a sandbox's PID namespace, however they are related, and their memory."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Members:
    """The processes of one PID namespace at one moment."""

    processes: int
    """bubblewrap's own first process included; 0 if the namespace has just ended."""
    resident_bytes: int
    """The sum of their resident memory. Pages that several of them share count several times."""


def members_of(pid: int) -> Members:
    """The members of the PID namespace in which `pid` lives, which must not be this process's.

    Every process of the machine is looked at: a list of descendants would miss one whose parent has ended.
    """
    try:
        namespace = os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return Members(0, 0)
    assert namespace != os.stat("/proc/self/ns/pid").st_ino, "this process's own namespace"
    processes = resident = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or is another user's and so no member
                if os.stat(f"/proc/{name}/ns/pid").st_ino == namespace:
                    processes += 1
                    with open(f"/proc/{name}/statm", "rb") as statm:
                        resident += int(statm.read().split()[1]) * _PAGE
    return Members(processes, resident)
