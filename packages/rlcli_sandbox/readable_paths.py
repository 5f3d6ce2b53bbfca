"""The folders that a sandboxed interpreter may read: the system's and Python's libraries, and nothing else."""

from __future__ import annotations

import os
import sys
from functools import cache

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Folders or, if /usr is merged, links into it."""
SETTINGS = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
"""The files of /etc needed to find libraries. Nothing in them is secret."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@cache
def interpreter() -> str:
    """The real interpreter under a virtual environment, which finds its standard library without `site`."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def packages() -> tuple[str, ...]:
    """Folders of installed packages, as this process has them, with links resolved. Never a checkout."""
    site_folders = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    return tuple(dict.fromkeys(os.path.realpath(path) for path in site_folders if os.path.isdir(path)))


@cache
def libraries() -> tuple[str, ...]:
    """Folders to read besides `SYSTEM`: the base Python's binaries and libraries, and `packages()`."""
    prefixes = [os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    wanted = [os.path.dirname(interpreter())]
    wanted += [os.path.join(prefix, part) for prefix in prefixes for part in ("bin", "lib", "lib64")]
    wanted = [path for path in dict.fromkeys([*wanted, *packages()]) if os.path.isdir(path)]
    return tuple(path for path in wanted if not _within(path, [*SYSTEM, *(other for other in wanted if other != path)]))


def _within(path: str, folders: list[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)
