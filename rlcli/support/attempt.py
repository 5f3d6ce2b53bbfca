"""The environment variables that a supervisor (`rlcli.cluster.supervisor.supervise`) passes to one attempt at a run,
and a program (`rlcli.api`) to the command that it has started."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import stat
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

REFUSED = 2
"""Exit code after an error that the user can fix, before any work was done."""
INTERRUPTED = 130
"""Exit code after an interrupt, as in a shell after Ctrl-C."""
RETRY = 75
"""Exit code of an attempt that failed for a cause outside the run: resuming from the last checkpoint may help."""
REPORTED = 76
"""Exit code of an attempt that failed and has printed the error, instead of 1: with 1 Ray silently ends a driver that
calls a dead raylet before a monitor has noticed."""

_SUPERVISED, _GROUP, _RESTARTS, _ERROR = "RLCLI_SUPERVISED", "RLCLI_GROUP", "RLCLI_RESTARTS", "RLCLI_ERROR"

_inherited = {name: os.environ.pop(name, "") for name in (_SUPERVISED, _GROUP, _RESTARTS, _ERROR)}
"""Removed from the environment: they are for this process, not for another rlcli started within the run, which would
remove the run's files."""
_supervisor = os.getppid()
_exit_functions: list[Callable[[], object]] = []
_leaves_ray = False


def child_environment(group: str, restarts: int) -> dict[str, str]:
    """The variables for an attempt. group: id in the names of its files outside the run folder. restarts: so far."""
    return {_SUPERVISED: "1", _GROUP: group, _RESTARTS: str(restarts)} | error_to(_inherited[_ERROR])


def error_to(file: str | Path) -> dict[str, str]:
    """The variable for a command whose error goes to `file` instead of the terminal; none if `file` is empty."""
    return {_ERROR: str(file)} if file else {}


def error_file() -> Path | None:
    """The file in which the program that has started this command reads its error; None if there is none."""
    return Path(_inherited[_ERROR]) if _inherited[_ERROR] else None


def is_supervised() -> bool:
    """True if a supervisor waits for this process, reports its failure, and may restart it. False if the supervisor was
    killed."""
    return bool(_inherited[_SUPERVISED]) and os.getppid() == _supervisor


def at_exit(function: Callable[[], object]) -> None:
    """Call a function of rlcli when this process exits, also if it leaves Ray behind."""
    atexit.register(function)
    _exit_functions.append(function)


def leave_ray_behind() -> None:
    """Leave the Ray cluster that is still starting in this process to the supervisor, which ends its processes: Ray's
    exit functions would first wait until it has started."""
    global _leaves_ray
    assert is_supervised()
    _leaves_ray = True


def run_exit_functions() -> None:
    """Run the exit functions of the interpreter; after `leave_ray_behind` those of rlcli alone."""
    if not _leaves_ray:
        atexit._run_exitfuncs()
        return
    for function in reversed(_exit_functions):
        function()


def is_restart() -> bool:
    """True if this attempt follows a failed one: resources that it needs may not be back yet."""
    return _inherited[_RESTARTS] not in ("", "0")


@functools.cache
def group_id() -> str:
    """Eight hexadecimal digits for the names of files of this process and its workers in /dev/shm and /tmp: set by the
    supervisor, so that it can remove those of a killed attempt; else random."""
    return _inherited[_GROUP] or uuid.uuid4().hex[:8]


def remove_leftovers(group: str) -> None:
    """Remove the files of an attempt in /dev/shm and /tmp of this machine; none of its processes may still run."""
    assert group, "or it would be everybody's"
    for root in ("/dev/shm", "/tmp"):
        for path in Path(root).glob(f"rlcli-*{group}-*"):
            remove_shared(path)


def remove_shared(path: Path) -> None:
    """Remove a file or folder of this user, if it exists, from a folder that all users of the machine share."""
    with suppress(OSError):
        status = path.lstat()
        if status.st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True) if stat.S_ISDIR(status.st_mode) else path.unlink()
