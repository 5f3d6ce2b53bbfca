"""The free memory of this machine, within the control groups and limits of this process."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from pathlib import Path

COPY_RESERVE = 512 << 20
"""Bytes that stay free on a machine with CPUs where a checkpoint is copied before it is written; else it is written
from the tensors that train, and training waits."""


def available_memory() -> float:
    """Bytes that this process and its children may still allocate: the limit of the machine and their control
    groups."""
    import psutil

    free = float(psutil.virtual_memory().available)
    for folder, limit, usage in _memory_groups():
        free = min(free, _number(folder / limit) - _number(folder / usage, 0.0) + _file_cache(folder))
    return max(free, 0.0)


def process_limit() -> float:
    """Maximum bytes of one process; infinite without a limit."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    return min((float(limit) for limit in limits if limit != resource.RLIM_INFINITY), default=math.inf)


def _memory_groups(root: str = "/sys/fs/cgroup", groups: str = "/proc/self/cgroup") -> Iterator[tuple[Path, str, str]]:
    """The folders of the memory groups that this process is in, and of those above them, with the names of the files
    for limit and usage (control groups of version 1 and 2)."""
    try:
        lines = Path(groups).read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", "0:memory:/"]:  # in a container its own group is the root
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = Path(root, controllers) if controllers else Path(root)
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(base):
                yield group, *names


def _file_cache(folder: Path) -> float:
    """Bytes of files in a group's memory: they count as used, and are freed when memory is needed."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    sizes = {name: float(size) for name, _, size in (line.partition(" ") for line in lines) if size.isdigit()}
    prefix = "total_" if "total_active_file" in sizes else ""
    return sum(sizes.get(f"{prefix}{kind}_file", 0.0) for kind in ("active", "inactive"))


def _number(path: Path, default: float = math.inf) -> float:
    try:
        return float(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # «max»: no limit
        return default
