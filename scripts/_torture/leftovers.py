"""Leftovers of runs in the folders for temporary files."""

from __future__ import annotations

import re
import time
from pathlib import Path

import psutil

PASSING = {"/tmp": ("rlcli-ray-",), "/dev/shm": ("rlcli-", "ray", "plasma", "torch_", "psm_", "sem.", "vllm")}
"""Where, and how the names begin: other programs leave theirs there too."""


def seen() -> set[str]:
    """The entries at present."""
    return {
        str(entry)
        for folder, beginnings in PASSING.items()
        for entry in Path(folder).iterdir()
        if entry.name.startswith(beginnings)
    }


def left_since(initial_entries: set[str]) -> list[str]:
    """New entries that are not in use: an entry that a live process names in its command line is another run's, and
    so are the files of an attempt whose reaper lives, which names the attempt's group, and those of a GPU check, which
    name its process. Ray's default folder, /tmp/ray, is of other programs: no run uses it."""
    new_entries = seen() - initial_entries
    time.sleep(2.0)  # a semaphore of multiprocessing has its name for a moment only
    new_entries &= seen()
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [entry for entry in sorted(new_entries) if not _is_used(entry, lines)]


def _is_used(entry: str, lines: list[str]) -> bool:
    check = re.search(r"/rlcli-gpu-check-(\d+)-", entry)
    if check:
        return psutil.pid_exists(int(check[1]))
    group = re.search(r"/rlcli-(?:[a-z]+-)?([0-9a-f]{8})-", entry)
    return any((group[1] if group else entry) in line for line in lines)


def below(scratch: Path) -> list[str]:
    """Entries of the folder that was a run's TMPDIR."""
    return [str(entry) for entry in sorted(scratch.rglob("*")) if not entry.is_dir() or not any(entry.iterdir())]
