"""What one attempt at a run is told by its supervisor (`rlcli.cli.supervise`), through its environment."""

from __future__ import annotations

import functools
import os
import shutil
import uuid
from pathlib import Path

INTERRUPTED = 130
"""Exit code of what was asked to leave, as a shell has it after Ctrl-C."""
RETRY = 75
"""Exit code of an attempt that failed for a cause outside the run: going on from the last checkpoint may help."""
TOLD = 76
"""Exit code of an attempt that failed and has said why, in the place of 1: with that Ray ends a driver, without a word,
that asks a dead raylet for something before a sentinel has seen it die."""

_SUPERVISED, _GROUP, _RESTARTS = "RLCLI_SUPERVISED", "RLCLI_GROUP", "RLCLI_RESTARTS"

_told = {name: os.environ.pop(name, "") for name in (_SUPERVISED, _GROUP, _RESTARTS)}
"""Out of the environment: it is told to this process, and not to another rlcli that something in the run starts, which
would clear up the run's own files."""
_supervisor = os.getppid()


def told(group: str, restarts: int) -> dict[str, str]:
    """The variables for an attempt. group: what names its folders outside the run's. restarts: how many came before."""
    return {_SUPERVISED: "1", _GROUP: group, _RESTARTS: str(restarts)}


def is_supervised() -> bool:
    """Whether a supervisor waits for this process, tells the user how it ended, and may start it again. One that has
    been killed does not."""
    return bool(_told[_SUPERVISED]) and os.getppid() == _supervisor


def is_restart() -> bool:
    """Whether this attempt follows one that failed: what it needs may not be back yet."""
    return _told[_RESTARTS] not in ("", "0")


@functools.cache
def group_id() -> str:
    """Eight hexadecimal digits for the names of what this process and its workers put in /dev/shm and /tmp: the
    supervisor's choice, so that it can remove what a killed attempt left; else new ones."""
    return _told[_GROUP] or uuid.uuid4().hex[:8]


def remove_leftovers(group: str) -> None:
    """Remove what an attempt has put in /dev/shm and /tmp of this machine; nothing of it may run any more."""
    assert group, "or it would be everybody's"
    for root in ("/dev/shm", "/tmp"):
        for path in Path(root).glob(f"rlcli-*{group}-*"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
