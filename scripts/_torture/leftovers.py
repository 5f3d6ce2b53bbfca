"""What runs leave behind in the folders for passing files, where nobody would look for it."""

from __future__ import annotations

from pathlib import Path

import psutil
from processes import line_of

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
    """What has come there and is no longer in use: what a live process names in its command line is another run's."""
    lines = [line_of(process) for process in psutil.process_iter()]
    return [entry for entry in sorted(seen() - before) if not any(entry in line for line in lines)]


def below(scratch: Path) -> list[str]:
    """What lies in the folder that was a run's TMPDIR."""
    return [str(entry) for entry in sorted(scratch.rglob("*")) if not entry.is_dir() or not any(entry.iterdir())]
