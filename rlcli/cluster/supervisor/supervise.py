"""The supervisor of a run: a small parent process that restarts the run from the last checkpoint after a process or
machine failure, and cleans up after it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from rlcli.cluster.supervisor.failure_record import Failure, last_failure, note_failure, resume_command
from rlcli.errors import RunFailed
from rlcli.runs.folder import add_event
from rlcli.runs.listing import checkpoints_of, config_of
from rlcli.support.attempt import INTERRUPTED, REPORTED, RETRY, child_environment, remove_leftovers
from rlcli.support.redact import printable

GRACE_S = 5.0
"""Time for the orphans of an attempt to end by themselves."""
PATIENCE_S, MOST_PATIENCE_S = 1.0, 60.0
"""Pause before the first restart, and the longest pause: each is twice as long as the previous one."""
SILENT = 1
"""Exit code of a child that a library has ended; own failures exit with REPORTED."""
LEAVING = {-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP}
"""Exit codes of a child that was signalled before it handled signals."""


def supervise(
    folder: Path,
    first: Sequence[str],
    resume: Sequence[str],
    *,
    resumes: bool = False,
    patience_s: float = PATIENCE_S,
    grace_s: float = GRACE_S,
) -> int:
    """Run the command `first` to train in `folder`, then `resume` as often as the run's configuration allows, if a
    cause outside the run has ended it. Returns the last exit code; 130 if it was asked to exit at once.

    Only restarts without progress count: a failure after a newer checkpoint than at any earlier failure resets the
    count. A run that fails at the same step each time is given up.

    resumes: `first` too resumes a run in the folder.
    Raises `RunFailed` with the failure and the command to resume, after the last attempt.
    """
    from rlcli.cluster.supervisor.subreaper import Children  # imports psutil

    initial_stamp, restarts, reached, words = _stamp(folder), 0, 0, first
    with Children(grace_s) as children:
        while True:
            started_at, group = time.time(), uuid.uuid4().hex[:8]
            status = children.run(words, {**os.environ, **child_environment(group, restarts)})
            remove_leftovers(group)
            if status == REPORTED:
                return 1
            if status >= 0 and status not in (RETRY, SILENT):
                return status
            _show_cursor()
            if children.asked > 1 or (children.asked and status in LEAVING):
                return INTERRUPTED
            started = resumes or _stamp(folder) not in (None, initial_stamp)  # None: --force had removed it
            failure = _failure(folder if started else None, status, started_at)
            # RETRY: if two threads recorded a failure, the one that exited decides.
            retry = started and (failure.retry or status == RETRY) and not children.asked
            max_restarts = _max_restarts(folder) if retry else 0
            if retry and (newest := max(checkpoints_of(folder), default=0)) > reached:
                restarts, reached = 0, newest
            if restarts >= max_restarts:
                raise _gave_up(failure, restarts, folder if started else None)
            restarts, words, resumes = restarts + 1, resume, True
            _announce(failure, folder, restarts, max_restarts)
            children.pause(min(MOST_PATIENCE_S, patience_s * 2.0 ** (restarts - 1)))
            if children.asked:
                return INTERRUPTED


def _stamp(folder: Path) -> tuple[int, int] | None:
    """A value that changes when the folder's configuration is written: from then on the run can be resumed."""
    try:
        status = (folder / "config.toml").stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _max_restarts(folder: Path) -> int:
    try:
        return int(config_of(folder)["fault_tolerance"]["max_restarts"])
    except (ValueError, LookupError):
        return 0


def _failure(folder: Path | None, status: int, started_at: float) -> Failure:
    """The failure that the attempt recorded since `started_at`; else derived from its exit status, and recorded.
    folder: None if the attempt ended before it wrote to it."""
    if folder and (failure := last_failure(folder, started_at)):
        return failure
    message, hint, killed_by = "the run failed silently", "", ""
    if status == SILENT:
        message = "the driver exited silently, as Ray does if the raylet is gone"
    if status < 0:
        killed_by = signal.Signals(-status).name
        message = f"the driver died of {killed_by}"
    if status == -signal.SIGKILL:
        hint = "if nobody killed it, the machine ran out of memory: see dmesg"
    if not folder:
        return Failure("", message, hint, retry=True)
    note_failure(folder, "the driver", message, hint, retry=True, since=started_at, signal=killed_by)
    return last_failure(folder, started_at) or Failure("", message, hint, retry=True)


def _announce(failure: Failure, folder: Path, restart: int, max_restarts: int) -> None:
    step = max(checkpoints_of(folder), default=0)
    from_where = f"step {step}" if step else "the start"
    add_event(folder, "restarted", restart=restart, of=max_restarts, step=step)
    _print(f"{failure.where}{failure.message}: restart {restart} of {max_restarts} from {from_where}")


def _gave_up(failure: Failure, restarts: int, folder: Path | None) -> RunFailed:
    spent = f"given up after {restarts} restarts without a newer checkpoint" if restarts else ""
    spent += " (fault_tolerance.max_restarts)" if restarts else ""
    further = resume_command(folder) if folder else "nothing was done yet"
    hint = "; ".join(part for part in (failure.hint, spent, further) if part)
    return RunFailed(failure.where + failure.message, hint)


def _show_cursor() -> None:
    """Show the cursor and end the line: a killed live view leaves both undone."""
    with contextlib.suppress(OSError, AttributeError):
        if sys.stderr.isatty():
            print("\x1b[?25h", file=sys.stderr, flush=True)


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        print(printable(" ".join(text.split())), file=sys.stderr, flush=True)
