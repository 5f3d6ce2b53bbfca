"""What runs leave behind in the folders for passing files, where nobody would look for it."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

PASSING = {"/tmp": ("rlcli-ray-", "ray"), "/dev/shm": ("rlcli-", "ray", "plasma", "torch_", "psm_", "sem.", "vllm")}
"""Where, and how the names begin: other programs leave theirs there too."""


def seen() -> set[str]:
    """What lies there now."""
    return {
        str(entry)
        for folder, beginnings in PASSING.items()
        for entry in Path(folder).iterdir()
        if entry.name.startswith(beginnings)
    }


def left_since(before: set[str]) -> list[str]:
    """What has come there and is no longer in use: what a live process names in its command line is another run's, and
    so are the files of an attempt whose reaper lives, which names the attempt's group."""
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [entry for entry in sorted(seen() - before) if not any(_name(entry) in line for line in lines)]


def _name(entry: str) -> str:
    """What processes that use an entry have in their command lines."""
    group = re.search(r"/rlcli-(?:[a-z]+-)?([0-9a-f]{8})-", entry)
    return group[1] if group else entry


def below(scratch: Path) -> list[str]:
    """What lies in the folder that was a run's TMPDIR."""
    return [str(entry) for entry in sorted(scratch.rglob("*")) if not entry.is_dir() or not any(entry.iterdir())]
