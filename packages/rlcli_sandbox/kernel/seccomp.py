"""The system-call filter: a classic BPF program that the kernel runs before each system call of a sandboxed process.

A list of refused rather than of allowed calls: which harmless calls numpy, glibc and Python make changes with each of
their versions (`rseq`, `futex_waitv`, `mbind`, …), and users would switch off a filter that breaks on the next release.
The refusal is still sound: calls newer than these tables do not exist inside (ENOSYS), other architectures' and x32's
numbers kill, and the file system and the network namespace are a second barrier for calls that this list misses. Each
call that starts a process, reaches another one, makes a socket, mounts, or holds memory that no limit counts is refused
with EPERM; `clone3` is unknown (ENOSYS), so that glibc starts its threads by `clone`, whose flags a filter can read.
"""

from __future__ import annotations

import errno
import platform
import struct
import sys

from rlcli.errors import SetupError
from rlcli_sandbox.kernel import syscalls

_Row = tuple[int, int, int, int]
"""One instruction: code, jump if true, jump if false, operand."""

_LOAD, _JUMP_EQUAL, _JUMP_GREATER, _JUMP_FROM, _JUMP_ANY, _AND, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_REFUSE, _UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_UNSUPPORTED = 0x00050000 | errno.EOPNOTSUPP
_NUMBER, _ARCHITECTURE = 0, 4
"""Offsets in `struct seccomp_data`; the arguments begin at 16, eight bytes each, the low half first."""

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000

OWN_PID = 0x52C11D00
"""Placeholder in the program for the process's own id, which only the process itself knows (see `inside.py`)."""

_CLONE_THREAD, _CLONE_NEW = 0x10000, 0x7E020000
_O_TRUNC, _O_ACCMODE, _MAP_HUGETLB, _AF_UNIX = 0x200, 0x3, 0x40000, 1
_FCNTL_HARMLESS = (*range(8), 9, 11, 36, 37, 38, 1030, 1032, 1034)
"""Copy, flag and lock descriptors; not F_SETOWN and F_SETSIG, which signal others, nor larger pipes."""
_IOCTL_HARMLESS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
"""Query a terminal, its size and the bytes to read; set non-blocking mode and inheritance. The other requests type into
terminals, signal other processes, or change a file that was opened for reading."""
_PRCTL_HARMLESS = (2, 3, 15, 16, 21, 23, 30, 38, 39, 0x53564D41)
"""Read flags, name a thread or a mapping, and no_new_privs, which is set already."""


_TO_START_PROGRAMS = ("execve", "fork", "setpgid", "vfork")


def program(keep_metadata: bool, programs: bool = False) -> bytes:
    """The filter for this machine, with `OWN_PID` as a placeholder.

    keep_metadata: also refuse to change modes, owners, times and lengths of files by name (the file system does not).
    programs: allow new processes and programs, which inherit the filter; namespaces stay refused.
    Raises `SetupError` on a machine other than x86_64 and aarch64.
    """
    if platform.machine() not in _MACHINES or sys.byteorder != "little" or sys.maxsize < 1 << 32:
        raise SetupError(f"the code sandbox does not support {platform.machine()}", "use a 64-bit x86 or ARM machine")
    column, architecture = _MACHINES[platform.machine()]
    rows: list[_Row] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_FROM, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_JUMP_GREATER, 0, 1, syscalls.NEWEST),
        (_RETURN, 0, 0, _UNKNOWN),
    ]
    for name, numbers in syscalls.JUDGED.items():
        rows += _when(numbers[column], _judgement(name, keep_metadata, programs))
    for table in (syscalls.NETWORK, syscalls.PROCESSES, syscalls.KERNEL, syscalls.MOUNTS, syscalls.SHARED):
        for name, numbers in table.items():
            if not (programs and name in _TO_START_PROGRAMS):
                rows += _when(numbers[column], [(_RETURN, 0, 0, _REFUSE)])
    if keep_metadata:
        for numbers in syscalls.METADATA.values():
            rows += _when(numbers[column], [(_RETURN, 0, 0, _REFUSE)])
    rows.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *row) for row in rows)


def _when(number: int | None, block: list[_Row]) -> list[_Row]:
    """`block`, which always returns, for the system call `number`; nothing if the machine has no such call."""
    if number is None or not block:
        return []
    return [(_JUMP_EQUAL, 0, len(block), number), *block]


def _judgement(name: str, keep_metadata: bool, programs: bool) -> list[_Row]:
    """Rules for a call's arguments; the kernel too reads all of them, except an address, as 32 bits."""
    if name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        return _only(0, OWN_PID)
    if name in ("prlimit64", "sched_setaffinity"):
        return _only(0, 0, OWN_PID)
    if name == "clone":
        thread = [] if programs else [(_JUMP_ANY, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _REFUSE)]
        return [_argument(0), *thread, (_JUMP_ANY, 0, 1, _CLONE_NEW), (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    if name in ("clone3", "openat2"):  # their arguments are in memory, which a filter cannot read
        return [(_RETURN, 0, 0, _UNKNOWN)] if name == "clone3" or keep_metadata else []
    if name == "fallocate":  # takes any space at once, before a monitored folder is checked
        return [(_RETURN, 0, 0, _UNSUPPORTED)] if keep_metadata else []
    if name in ("open", "openat"):
        # O_TRUNC without a right to write: Landlock before Linux 6.2 treats it as reading.
        return _truncation(1 if name == "open" else 2) if keep_metadata else []
    if name == "prctl":
        return _only(0, *_PRCTL_HARMLESS)
    if name == "fcntl":
        return _only(1, *_FCNTL_HARMLESS)
    if name == "ioctl":
        return _only(1, *_IOCTL_HARMLESS)
    if name == "socketpair":
        return _only(0, _AF_UNIX)
    if name == "sendto":  # a datagram with an address reaches any socket of the machine, even from a pair
        low, high = _only(4, 0), _argument(4, high=True)
        return [low[0], (_JUMP_EQUAL, 0, 3, 0), high, (_JUMP_EQUAL, 0, 1, 0), low[-2], low[-1]]
    assert name == "mmap", name  # no limit counts huge pages
    return [_argument(3), (_JUMP_ANY, 0, 1, _MAP_HUGETLB), (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]


def _argument(index: int, high: bool = False) -> _Row:
    return (_LOAD, 0, 0, 16 + 8 * index + (4 if high else 0))


def _only(index: int, *values: int) -> list[_Row]:
    rows = [_argument(index)]
    for value in values:
        rows += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*rows, (_RETURN, 0, 0, _REFUSE)]


def _truncation(index: int) -> list[_Row]:
    rows = [_argument(index), (_AND, 0, 0, _O_TRUNC | _O_ACCMODE), (_JUMP_EQUAL, 0, 1, _O_TRUNC)]
    return [*rows, (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
