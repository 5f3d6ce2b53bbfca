"""Landlock: the kernel's file access control, for machines that block user namespaces (Linux 5.13 and newer).

A process that has entered a ruleset reads and writes only what the ruleset names, permanently. Network and signals are
restricted too if the kernel can; the system-call filter refuses them on every kernel.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from functools import cache

from rlcli.errors import SetupError
from rlcli_sandbox import readable_paths

_CREATE_RULESET, _ADD_RULE, _RULE_PATH_BENEATH = 444, 445, 1
_VERSION_FLAG = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _READ_FILE | _READ_DIR
_MAKE_DEVICES_AND_SOCKETS = 1 << 6 | 1 << 9 | 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_TCP = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11


@cache
def version() -> int:
    """The version of the kernel's Landlock interface. Raises `SetupError` if there is none."""
    abi = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
    if abi < 1:
        raise SetupError(
            f"landlock: {os.strerror(ctypes.get_errno())}",
            "boot Linux 5.13 or newer with landlock among its security modules (lsm=landlock,…)",
        )
    return int(abi)


def ruleset(private: str) -> int:
    """A file descriptor of a ruleset: libraries to read, `private` with full access. The caller closes it."""
    handled = (1 << 13) - 1
    for first_version, rights in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEVICE)):
        handled |= rights if version() >= first_version else 0
    # Fields unknown to an older kernel must not be sent: it refuses a longer structure.
    attributes = struct.pack("<Q", handled)
    attributes += struct.pack("<Q", _TCP) if version() >= 4 else b""
    attributes += struct.pack("<Q", _ABSTRACT_SOCKETS_AND_SIGNALS) if version() >= 6 else b""
    fd = _libc().syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if fd < 0:
        raise SetupError(f"landlock: no ruleset: {os.strerror(ctypes.get_errno())}")
    try:
        for path in (*readable_paths.SYSTEM, *readable_paths.SETTINGS, *readable_paths.libraries()):
            _allow(fd, path, _READ)
        for path in readable_paths.DEVICES:
            _allow(fd, path, _READ_FILE | _WRITE_FILE)
        _allow(fd, private, handled & ~(_EXECUTE | _MAKE_DEVICES_AND_SOCKETS | _IOCTL_DEVICE))
    except BaseException:
        os.close(fd)
        raise
    return int(fd)


def _allow(ruleset_fd: int, path: str, rights: int) -> None:
    """Allow `rights` below `path`, if it exists."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_A_FILE
        rule = struct.pack("<Qi", rights, fd)
        if _libc().syscall(_ADD_RULE, ruleset_fd, _RULE_PATH_BENEATH, rule, ctypes.c_uint32(0)) != 0:
            raise SetupError(f"landlock: {path}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
