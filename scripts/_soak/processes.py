"""Resources of the processes of a run: memory, file descriptors, threads, and their files in shared memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from pathlib import Path

import psutil

SHARED = Path("/dev/shm")
RAY = ("gcs_server", "raylet")
_ANONYMOUS = re.compile(r"^(?:RssAnon|RssFile):\s+(\d+) kB", re.M)

Values = dict[tuple[str, str], float]
"""Process and quantity → value: `("driver", "memory MiB")`."""


def measured(supervisor: int) -> Values:
    """For each kind of process below the supervisor (the sum, where there are several): how many there are, resident
    memory that is its own (MiB; without the object store, which is mapped into all), file descriptors, and threads."""
    values: Values = defaultdict(float)
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(supervisor)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):  # it has ended meanwhile
                for quantity, value in _of_one(process).items():
                    values[_name(process, supervisor), quantity] += value
    return dict(values)


def shared_memory() -> Values:
    """Use of /dev/shm: bytes in use, by any process of this machine, and the files of runs of rlcli."""
    use = os.statvfs(SHARED)
    names = [name for name in os.listdir(SHARED) if name.startswith("rlcli-")]
    used = (use.f_blocks - use.f_bfree) * use.f_frsize / 2**20
    return {("/dev/shm", "memory MiB"): used, ("/dev/shm", "files"): float(len(names))}


def gcs_address(supervisor: int) -> str:
    """Processes of the run's own Ray cluster; empty as long as there is none."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(supervisor).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                for word in process.cmdline() if process.name() == "raylet" else ():
                    if word.startswith("--gcs-address="):
                        return word.partition("=")[2]
    return ""


def object_store(address: str) -> Values:
    """Bytes in use and objects in Ray's object store, as its raylet counts them."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    stats = get_memory_info_reply(get_state_from_address(address)).store_stats
    used = stats.object_store_bytes_used / 2**20
    return {("object store", "memory MiB"): used, ("object store", "objects"): float(stats.num_local_objects)}


def _of_one(process: psutil.Process) -> dict[str, float]:
    with process.oneshot():
        status = Path(f"/proc/{process.pid}/status").read_text()
        memory = sum(int(kib) for kib in _ANONYMOUS.findall(status)) / 1024
        if not memory:
            return {}  # a zombie, or one that is just beginning
        return {
            "processes": 1.0,
            "memory MiB": memory,
            "descriptors": float(process.num_fds()),
            "threads": float(process.num_threads()),
        }


def _name(process: psutil.Process, supervisor: int) -> str:
    """Its name in the table. A worker is named after its log: the process name is that of the current call. Names of
    Ray's agents begin likewise."""
    if process.pid == supervisor:
        return "supervisor"
    line = " ".join(process.cmdline())
    if line.startswith("ray::"):
        log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        return f"worker {log.stem}" if log.parent.name == "logs" and log.suffix == ".log" else "ray: agents"
    if process.name() in RAY:
        return f"ray: {process.name()}"
    if "rlcli.rewards" in line:
        return "scoring"
    if "rlcli.cli.main" in line:
        return "driver"
    if "rlcli." in line:
        return next(word for word in line.split() if word.startswith("rlcli."))
    return "ray: agents" if "/ray/" in line else "other"
